"""Restoring: which checkpoint all ranks take, reading its tensors, and putting them back. Runs in a rank."""
