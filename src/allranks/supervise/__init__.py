"""Keeps replicas running: restarts, logs, orphans. Runs in the agent; knows nothing of incidents."""
