"""Limits on what others can make us do: log lines."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

_MAX_KINDS = 1000


@dataclass
class FoldedLog:
    """Repeated log lines: one per kind and `every_s`, with a count of the rest."""

    log: logging.Logger
    every_s: float = 5.0
    _last: dict[str, float] = field(default_factory=dict)
    _skipped: dict[str, int] = field(default_factory=dict)

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Logs a warning, unless one of its kind was logged a moment ago."""
        now = time.monotonic()
        if now - self._last.get(kind, -self.every_s) < self.every_s:
            self._skipped[kind] = self._skipped.get(kind, 0) + 1
            return
        more = self._skipped.pop(kind, 0)
        self._last.pop(kind, None)
        self._last[kind] = now
        if len(self._last) > _MAX_KINDS:
            del self._last[next(iter(self._last))]
        self.log.warning(text + (f" (and {more} more like it)" if more else ""), *args)
