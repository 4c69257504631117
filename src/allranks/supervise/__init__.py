"""Keeps replicas running: restarts, logs, orphans. Runs in the agent; independent of incidents."""
