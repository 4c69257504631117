"""What the lighthouse tells: events for people (log, history, listeners), notices for clients."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from allranks.lighthouse.sessions import Sessions
from allranks.lighthouse.status import StatusEvent
from allranks.model.cluster import Notice
from allranks.model.parsing import printable

log = logging.getLogger("allranks.lighthouse")

_LOUD = frozenset({"lost", "evicted", "stalled", "incident"})


@dataclass
class EventLog:
    """Collects notices until `flush`, so that those for the same receivers go out together."""

    sessions: Sessions
    history: deque[StatusEvent] = field(default_factory=lambda: deque(maxlen=1000))
    counts: Counter[str] = field(default_factory=Counter)  # of events, by kind, since the start
    _listeners: list[Callable[[StatusEvent], None]] = field(default_factory=list)
    _waiting: list[tuple[Notice, frozenset[str]]] = field(default_factory=list)

    def event(self, kind: str, text: str, replica: str = "", number: int = 0) -> None:
        """Something happened."""
        text, replica = printable(text), printable(replica)
        event = StatusEvent(time.time(), kind, text, replica, number)
        self.history.append(event)
        self.counts[kind] += 1
        log.log(logging.WARNING if kind in _LOUD else logging.INFO, "%s", text, extra={"event": kind})
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed")

    def subscribe(self, listener: Callable[[StatusEvent], None]) -> Callable[[], None]:
        """Calls `listener` for every event; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, notice: Notice, replicas: Iterable[str]) -> None:
        """Notes a notice for all sessions of these replicas."""
        self._waiting.append((notice, frozenset(replicas)))

    def flush(self) -> None:
        """Pushes what was noted."""
        waiting, self._waiting = self._waiting, []
        groups: dict[frozenset[str], list[Notice]] = {}
        for notice, targets in waiting:
            groups.setdefault(targets, []).append(notice)
        for targets, notices in groups.items():
            self.sessions.push(notices, targets)

    def clear(self) -> None:
        """Forgets what was noted."""
        self._waiting.clear()
