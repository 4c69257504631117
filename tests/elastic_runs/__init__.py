"""Whole jobs under `allranks run`: killed, resized and come back."""
