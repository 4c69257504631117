"""Restoring a checkpoint. Runs in a rank."""
