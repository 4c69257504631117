"""Limits on what others can make us do: open connections without proving who they are, and log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_KINDS = 1000
C = TypeVar("C", bound=Hashable)


@dataclass(eq=False)
class ConnectionSlots(Generic[C]):
    """Unauthenticated connections, at most `limit`: one more makes the oldest of the host that has most give way."""

    limit: int
    _host_of: dict[C, str] = field(default_factory=dict)  # oldest first
    _by_host: dict[str, dict[C, None]] = field(default_factory=dict)  # each oldest first

    def __iter__(self) -> Iterator[C]:
        return iter(self._host_of)

    def __contains__(self, connection: object) -> bool:
        return connection in self._host_of

    def add(self, connection: C, host: str) -> C | None:
        """Takes it in; returns the one that must be closed for it, which the caller removes."""
        self._host_of[connection] = host
        self._by_host.setdefault(host, {})[connection] = None
        return self.crowding() if len(self._host_of) > self.limit else None

    def remove(self, connection: C) -> None:
        """Closed, or authenticated."""
        here = self._by_host[host := self._host_of.pop(connection)]
        del here[connection]
        if not here:
            del self._by_host[host]

    def oldest(self) -> C | None:
        return next(iter(self._host_of), None)

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
