"""Saving a checkpoint. Runs in a rank and its helper process."""
