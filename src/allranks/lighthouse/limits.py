"""Limits of the process that a lighthouse with thousands of connections needs, and of what it logs."""

from __future__ import annotations

import gc
import logging
import resource
import time
from dataclasses import dataclass, field

log = logging.getLogger("allranks.lighthouse")


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


@dataclass
class Throttle:
    """Log lines that an attacker must not be able to multiply: one per kind and second, with a count of the rest."""

    every_s: float = 1.0
    _last: dict[str, float] = field(default_factory=dict)
    _skipped: dict[str, int] = field(default_factory=dict)

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Logs a warning, unless one of its kind was logged a moment ago."""
        now = time.monotonic()
        if now - self._last.get(kind, -self.every_s) < self.every_s:
            self._skipped[kind] = self._skipped.get(kind, 0) + 1
            return
        more = self._skipped.pop(kind, 0)
        self._last[kind] = now
        log.warning(text + (f" (and {more} more like it)" if more else ""), *args)
