"""Diagnosis and traces → something to read: text, JSON, one HTML page, a Perfetto timeline. Pure; callers write files."""
