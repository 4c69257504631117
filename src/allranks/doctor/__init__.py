"""Checks before a job, and explanations of its logs after it."""
