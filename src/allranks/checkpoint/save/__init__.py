"""Saving: copy out of the model, plan, write through the helper process, commit. Runs in a rank and its helper."""
