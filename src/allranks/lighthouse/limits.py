"""Limits of the process that a lighthouse with thousands of connections needs."""

from __future__ import annotations

import gc
import resource


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_files_limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def calm_collector() -> None:
    """Lets the cyclic collector run rarely: with ten thousand sessions a full run is a pause that clients feel."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
