"""A small server for authenticated members.

One thread accepts all connections and runs their handshakes: at most MAX_UNAUTHENTICATED at a time (beyond that the host
with the most connections loses its oldest), each with a time limit. Each member is served in its own thread.
"""

from __future__ import annotations

import errno
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from allranks.channel.frames import cut
from allranks.channel.keys import GREETING_S, ChannelError, Keyring, ServerGreeting

_MAX_KINDS = 1000
C = TypeVar("C")


@dataclass(eq=False)
class ConnectionSlots(Generic[C]):
    """Unauthenticated connections, at most `limit`; beyond it the host with the most connections loses its oldest."""

    limit: int
    _known: dict[C, tuple[str, float]] = field(default_factory=dict)  # host, deadline; oldest first
    _by_host: dict[str, dict[C, None]] = field(default_factory=dict)  # each oldest first

    def __iter__(self) -> Iterator[C]:
        return iter(self._known)

    def __contains__(self, connection: object) -> bool:
        return connection in self._known

    def add(self, connection: C, host: str, until: float = math.inf) -> C | None:
        """Adds a connection; returns the one that the caller must close and remove for it."""
        self._known[connection] = host, until
        self._by_host.setdefault(host, {})[connection] = None
        return self.crowding() if len(self._known) > self.limit else None

    def remove(self, connection: C) -> None:
        """Forgets a closed or authenticated connection, if it is known."""
        host, _ = self._known.pop(connection, ("", 0.0))
        if here := self._by_host.get(host):
            here.pop(connection, None)
            if not here:
                del self._by_host[host]

    def late(self, now: float) -> list[C]:
        """The connections past their deadline."""
        return [connection for connection, (_, until) in self._known.items() if until <= now]

    def first_deadline(self) -> float | None:
        """The deadline of the oldest connection; all have the same time."""
        return next((until for _, until in self._known.values()), None)

    def crowding(self) -> C | None:
        """The oldest connection of the host that has the most."""
        crowd = max(self._by_host.values(), key=len, default=None)
        return next(iter(crowd)) if crowd else None


@dataclass
class FoldedLog:
    """Limits repeated warnings: one per kind in `every_s`, with a count of the rest."""

    log: logging.Logger
    every_s: float = 5.0
    _last: dict[str, float] = field(default_factory=dict)
    _skipped: dict[str, int] = field(default_factory=dict)

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Logs a warning unless one of its kind was logged within `every_s`."""
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


log = logging.getLogger("allranks.channel")

MAX_UNAUTHENTICATED = 128
MAX_MEMBERS = 1024
BACKLOG = 1024
_AT_ONCE = 64  # connections accepted before others are read
_CROWDED_PAUSE_S = 0.001  # leaves the processor to the rest of this process
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_DEAD = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_FULL_PAUSE_S = 0.05


@dataclass(eq=False)
class _Unauthenticated:
    connection: socket.socket
    greeting: ServerGreeting


@dataclass(eq=False)
class MemberServer:
    """`serve(connection, purpose)` runs in its own thread and may detach the connection to keep it."""

    keys: Keyring
    kind: str  # first word of the accepted purposes
    serve: Callable[[socket.socket, str], None]
    name: str = "allranks-server"  # of its threads
    greeting_s: float = GREETING_S
    proves: str = ""  # the name that clients expect in our proof
    _listener: socket.socket | None = None
    _members: set[socket.socket] = field(default_factory=set)
    _threads: set[threading.Thread] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, listener: socket.socket) -> None:
        """Takes over a bound socket and accepts connections."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listener = listener
        self._spawn(lambda: _Acceptor(self, listener).run(), "server")

    def close(self) -> None:
        """Stops listening, ends all connections, waits for the threads."""
        listener, self._listener = self._listener, None
        if listener is not None:
            cut(listener)  # wakes its thread
        with self._lock:
            connections, threads = list(self._members), list(self._threads)
        for connection in connections:
            cut(connection)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(5.0)
        if listener is not None:
            listener.close()

    def accepts(self, listener: socket.socket) -> bool:
        """Whether this listener is still open."""
        return self._listener is listener

    def admit(self, connection: socket.socket, purpose: str) -> None:
        """Serves an authenticated connection, if there is room."""
        with self._lock:
            full = len(self._members) >= MAX_MEMBERS or self._listener is None
            if not full:
                self._members.add(connection)
        try:
            if not full:
                self._spawn(lambda: self._serve(connection, purpose), "member")
        except RuntimeError:  # out of threads
            full = True
        if full:
            self._forget(connection)

    def _serve(self, connection: socket.socket, purpose: str) -> None:
        try:
            self.serve(connection, purpose)
        except (OSError, ChannelError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("%s: a connection ended: %s", self.name, error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._members.discard(connection)
        connection.close()

    def _spawn(self, target: Callable[[], None], role: str) -> None:
        thread = threading.Thread(target=target, name=f"{self.name}-{role}", daemon=True)
        with self._lock:
            self._threads = {each for each in self._threads if each.is_alive()}
            thread.start()
            self._threads.add(thread)


class _Acceptor:
    """Accepts connections and runs their handshakes, in one thread."""

    def __init__(self, server: MemberServer, listener: socket.socket) -> None:
        self._server, self._listener = server, listener
        self._selector = selectors.DefaultSelector()
        self._slots = ConnectionSlots[_Unauthenticated](MAX_UNAUTHENTICATED)

    def run(self) -> None:
        with self._selector:
            try:
                self._loop()
            finally:
                for one in list(self._slots):
                    self._drop(one)

    def _loop(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while self._server.accepts(self._listener):
            until = self._slots.first_deadline()
            for key, _ in self._selector.select(
                None if until is None else max(0.0, until - time.monotonic())
            ):
                if key.data is not None:
                    self._read(key.data)
                elif not self._accept():
                    return
            for late in self._slots.late(time.monotonic()):
                self._drop(late)

    def _accept(self) -> bool:
        """Accepts waiting connections; False when the listener is closed."""
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _DEAD:
                    if self._server.accepts(self._listener):
                        log.error("%s: stopped accepting connections: %s", self._server.name, error)
                    return False
                if (
                    error.errno in _FULL
                ):  # out of descriptors: drops an unauthenticated connection, then tries again
                    self._drop_one()
                    time.sleep(_FULL_PAUSE_S)
                return True
            self._greet(connection, str(address[0]))
        time.sleep(_CROWDED_PAUSE_S)
        return True

    def _greet(self, connection: socket.socket, host: str) -> None:
        greeting = ServerGreeting(self._server.keys, self._server.kind, self._server.proves)
        one = _Unauthenticated(connection, greeting)
        try:
            self._selector.register(connection, selectors.EVENT_READ, one)
        except OSError as error:  # the user's limit of epoll watches
            log.warning("%s: a connection was refused: %s", self._server.name, error)
            connection.close()
            self._drop_one()
            return
        surplus = self._slots.add(one, host, time.monotonic() + self._server.greeting_s)
        try:
            connection.setblocking(False)
            connection.send(greeting.hello)
        except OSError:
            surplus = one
        if surplus is not None:
            self._drop(surplus)

    def _read(self, one: _Unauthenticated) -> None:
        if one not in self._slots:
            return  # just dropped
        connection = one.connection
        try:
            data = connection.recv(one.greeting.wanted)
            if not data:
                raise ChannelError("the other side closed the connection")
            proved = one.greeting.take(data)
            if proved is None:
                return
            connection.send(proved[1])
            connection.setblocking(True)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("%s: a connection ended: %s", self._server.name, error)
            self._drop(one)
            return
        self._forget(one)
        self._server.admit(connection, proved[0])

    def _drop_one(self) -> None:
        """Drops the oldest connection of the host that has the most."""
        if (crowding := self._slots.crowding()) is not None:
            self._drop(crowding)

    def _drop(self, one: _Unauthenticated) -> None:
        self._forget(one)
        cut(one.connection)  # a forked process may hold the socket too
        one.connection.close()

    def _forget(self, one: _Unauthenticated) -> None:
        self._selector.unregister(one.connection)
        self._slots.remove(one)
