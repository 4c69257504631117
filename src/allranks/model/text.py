"""Text from outside, before it is printed, logged or shown. Pure."""

from __future__ import annotations


def printable(text: str, limit: int = 2000) -> str:
    """Without control characters, which would steer a terminal, and not longer than `limit`."""
    text = text if len(text) <= limit else f"{text[:limit]} …"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
