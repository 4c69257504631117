"""Log lines that an attacker must not be able to multiply: one per kind and second, with a count of the rest."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

log = logging.getLogger("allranks.lighthouse")


@dataclass
class Throttle:
    """Remembers when each kind was last logged."""

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
