"""Limits on what others can make us do: open connections without proving who they are, and log lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_KINDS = 1000
C = TypeVar("C")


@dataclass(eq=False)
class ConnectionSlots(Generic[C]):
    """Connections of hosts that we do not know, at most `limit`: one more makes the oldest of the host that has most give way."""

    limit: int
    _known: dict[C, tuple[str, float]] = field(default_factory=dict)  # host, deadline; oldest first
    _by_host: dict[str, dict[C, None]] = field(default_factory=dict)  # each oldest first

    def __iter__(self) -> Iterator[C]:
        return iter(self._known)

    def __contains__(self, connection: object) -> bool:
        return connection in self._known

    def add(self, connection: C, host: str, until: float = math.inf) -> C | None:
        """Takes it in; returns the one that must be closed for it, which the caller removes."""
        self._known[connection] = host, until
        self._by_host.setdefault(host, {})[connection] = None
        return self.crowding() if len(self._known) > self.limit else None

    def remove(self, connection: C) -> None:
        """Closed, or authenticated; it may be removed already."""
        host, _ = self._known.pop(connection, ("", 0.0))
        if here := self._by_host.get(host):
            here.pop(connection, None)
            if not here:
                del self._by_host[host]

    def late(self, now: float) -> list[C]:
        """Those whose time is over."""
        return [connection for connection, (_, until) in self._known.items() if until <= now]

    def first_deadline(self) -> float | None:
        """Of the oldest; all have the same time."""
        return next((until for _, until in self._known.values()), None)

    def crowding(self) -> C | None:
        """The oldest of the host that has most."""
        crowd = max(self._by_host.values(), key=len, default=None)
        return next(iter(crowd)) if crowd else None


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
