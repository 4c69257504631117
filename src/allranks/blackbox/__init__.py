"""The black box file: its layout, writer and readers. Used by every process; imports nothing but model and errors."""
