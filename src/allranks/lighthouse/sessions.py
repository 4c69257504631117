"""Sessions of the lighthouse's clients, and the notices they have not acknowledged. Runs on the loop's thread.

A session belongs to one rank or observer and outlives its connection: after an interruption the same session
reconnects and gets the notices that it missed. `EventLog` publishes events for people (log, history, listeners) and
notices for clients.

`Names` gives each name to one process. A second process is refused while the first is alive, and told to wait while
that is not known. A process whose name went to another never gets it back.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from allranks.lighthouse.messages import Refused, encode
from allranks.lighthouse.status import StatusEvent
from allranks.model.cluster import Member, MemberLost, Notice
from allranks.model.parsing import printable

log = logging.getLogger("allranks.lighthouse")

_MAX_PENDING = 256
_MAX_NAME = 256  # characters in the name of a replica or node


class Peer(Protocol):
    """The other end of a session: a TCP connection, or a caller inside this process (the gRPC listener)."""

    address: str

    def deliver(self, message: object, frame: bytes) -> None:
        """Sends one message; `frame` is its encoding, made once for all receivers."""

    def close(self) -> None:
        """Ends the connection once everything delivered has been sent."""


@dataclass(slots=True, eq=False)
class Session:
    """One rank or observer."""

    replica: str
    session: str
    rank: int
    observer: bool
    node: str
    connections: int
    peer: Peer | None
    heard: float
    asking: Member | None = None
    step: int = -1
    progress: int = -1
    idle_s: float = 0.0
    health: str = ""
    unresponsive: bool = False  # it acknowledges nothing; logged once
    cut: bool = False  # the last connection ended with an error, not with an orderly close
    dialect: str = ""  # of a protocol other than ours
    # connected by a liveness proxy: if that is killed, the rank is alive and starts another
    proxy: bool = False
    pending: dict[int, tuple[Notice, bytes]] = field(default_factory=dict)

    @property
    def end(self) -> str:
        """What the end of the connection means for the process."""
        where = f" (rank {self.rank})" if self.connections > 1 else ""
        if self.cut:
            return f"connection{where} was cut and did not come back"
        return f"process{where} exited without shutting down"

    def tell(self, message: object, frame: bytes, close: bool = False) -> None:
        """Sends a message if the session is connected, then closes the connection if asked."""
        if self.peer is not None:
            self.peer.deliver(message, frame)
            if close:
                self.peer.close()


@dataclass
class Sessions:
    """All sessions, by replica and rank."""

    by_replica: dict[str, dict[int, Session]] = field(default_factory=dict)
    observers: frozenset[str] = frozenset()
    _next_id: int = field(default_factory=lambda: secrets.randbits(40) << 20)  # no two lighthouses share ids

    def __iter__(self) -> Iterator[Session]:
        for ranks in self.by_replica.values():
            yield from ranks.values()

    def get(self, replica: str, rank: int) -> Session | None:
        return self.by_replica.get(replica, {}).get(rank)

    def of(self, replica: str) -> list[Session]:
        return list(self.by_replica.get(replica, {}).values())

    def add(self, session: Session) -> None:
        self.by_replica.setdefault(session.replica, {})[session.rank] = session
        if session.observer:
            self.observers |= {session.replica}

    def drop(self, replica: str) -> list[Session]:
        """Forgets a replica; returns the sessions it had."""
        if replica in self.observers:
            self.observers -= {replica}
        return list(self.by_replica.pop(replica, {}).values())

    def clear(self) -> None:
        self.by_replica.clear()
        self.observers = frozenset()

    def find_silent(self, now: float, timeout_s: float) -> tuple[list[Session], float]:
        """Sessions not heard for `timeout_s`, and when the next one may become silent."""
        silent, oldest = [], now
        limit = now - timeout_s
        for session in self:
            if session.heard <= limit:
                silent.append(session)
            elif session.heard < oldest:
                oldest = session.heard
        return silent, oldest + timeout_s

    def push(self, notices: Iterable[Notice], replicas: Iterable[str]) -> int:
        """Sends notices to all sessions of these replicas; they stay pending until acknowledged."""
        batch: dict[int, tuple[Notice, bytes]] = {}
        for notice in notices:
            self._next_id += 1
            batch[self._next_id] = (notice, encode(notice, self._next_id))
        reached = 0
        for name in replicas:
            for session in self.by_replica.get(name, {}).values():
                session.pending.update(batch)
                if len(session.pending) > _MAX_PENDING:
                    self._trim(session)
                deliver(session, batch)
                reached += 1
        return reached

    def _trim(self, session: Session) -> None:
        """Drops the oldest notices of a session that acknowledges nothing, to bound memory."""
        while len(session.pending) > _MAX_PENDING:
            del session.pending[next(iter(session.pending))]
        if not session.unresponsive:
            session.unresponsive = True
            log.warning("%s acknowledges nothing: its oldest notices are dropped", session.replica)


def deliver(session: Session, batch: dict[int, tuple[Notice, bytes]]) -> None:
    """Sends pending notices if the session is connected."""
    if session.peer is not None:
        for notice, frame in batch.values():
            session.peer.deliver(notice, frame)


def signed(member: Member, session: Session, dialect: str = "") -> Member:
    """A client can only describe itself: name, session and dialect are taken from its connection."""
    own = member.replica == session.replica and member.session == session.session
    if own and member.node and member.dialect == dialect:
        return member
    node = member.node or session.node
    return replace(member, replica=session.replica, session=session.session, node=node, dialect=dialect)


def merged(ranks: list[Session]) -> Member:
    """The replica's member data: the lowest rank's, with the failures and wishes of all ranks combined."""
    members = [each.asking for each in sorted(ranks, key=lambda each: each.rank) if each.asking]
    return replace(
        members[0],
        shrink_only=any(member.shrink_only for member in members),
        commit_failures=max(member.commit_failures for member in members),
        step=min(member.step for member in members),
    )


_WARNINGS = frozenset({"lost", "evicted", "incident", "went_back"})


@dataclass
class EventLog:
    """Collects notices until `flush`, so that those for the same receivers go out together."""

    sessions: Sessions
    history: deque[StatusEvent] = field(default_factory=lambda: deque(maxlen=1000))
    counts: Counter[str] = field(default_factory=Counter)  # of events, by kind, since the start
    _listeners: list[Callable[[StatusEvent], None]] = field(default_factory=list)
    _waiting: list[tuple[Notice, frozenset[str]]] = field(default_factory=list)

    def event(self, kind: str, text: str, replica: str = "", number: int = 0) -> None:
        text, replica = printable(text), printable(replica)
        event = StatusEvent(time.time(), kind, text, replica, number)
        self.history.append(event)
        self.counts[kind] += 1
        log.log(logging.WARNING if kind in _WARNINGS else logging.INFO, "%s", text, extra={"event": kind})
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed")

    def subscribe(self, listener: Callable[[StatusEvent], None]) -> Callable[[], None]:
        """Calls `listener` for every event; returns "unsubscribe"."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def notify(self, notice: Notice, replicas: Iterable[str]) -> None:
        """Queues a notice for all sessions of these replicas."""
        self._waiting.append((notice, frozenset(replicas)))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        groups: dict[frozenset[str], list[Notice]] = {}
        for notice, targets in waiting:
            groups.setdefault(targets, []).append(notice)
        for targets, notices in groups.items():
            self.sessions.push(notices, targets)

    def clear(self) -> None:
        self._waiting.clear()


T = TypeVar("T")
_REMEMBERED = 10_000  # past sessions


@dataclass
class Names:
    """Sessions that do not currently hold their name."""

    lost: dict[str, MemberLost] = field(default_factory=dict)  # declared lost; may return
    _retired: dict[str, str] = field(default_factory=dict)  # another process has the name
    _applied: dict[str, float] = field(default_factory=dict)  # waiting for a taken name -> since when

    def refuse(
        self, name: str, session: str, first: Session | None, now: float, beat_s: float
    ) -> Refused | None:
        """Why this session cannot have the name now; `first` is the session of another process that has it.

        The first process is alive if it was heard again after the second one connected.
        """
        if session in self._retired:
            return superseded(name)
        if first is None:
            self._applied.pop(session, None)
            return None
        since = self._applied.get(session, now)
        _note(self._applied, session, since)
        heard_s = max(0.0, now - first.heard)
        age = f"{name} is the name of another process on {first.node or '?'}, heard {heard_s:.1f} s ago"
        if first.peer is None or first.heard - since < beat_s / 2:
            return Refused("waiting", f"{age}: waiting until it is known whether that process lives")
        return Refused("taken", age)

    def retire(self, name: str, session: str) -> None:
        """Another process has its name from now on."""
        _note(self._retired, session, name)

    def retire_lost(self, name: str, session: str) -> None:
        """Retires all other lost sessions of this name."""
        for other in [
            other for other, lost in self.lost.items() if lost.replica == name and other != session
        ]:
            self.retire(name, other)
            del self.lost[other]

    def lose(self, lost: MemberLost) -> None:
        _note(self.lost, lost.session, lost)


def refuse_names(*names: str) -> Refused | None:
    """Refuses names that are too long or not printable."""
    if all(len(name) <= _MAX_NAME and name.isprintable() for name in names):
        return None
    wanted = f"be printable, without control characters, and have at most {_MAX_NAME}"
    return Refused("garbage", f"names of replicas and nodes must {wanted}")


def superseded(name: str) -> Refused:
    return Refused("superseded", f"{name}: another process of the same name has replaced this one")


def _note(book: dict[str, T], key: str, value: T) -> None:
    book[key] = value
    if len(book) > _REMEMBERED:
        del book[next(iter(book))]
