"""Public test tools: real ranks forked from one pre-imported process, fault plans, a local cluster."""
