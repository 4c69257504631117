"""Limits of the process that a lighthouse with thousands of connections needs."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
