"""A small server for members only: it greets whoever connects and hands on those who proved that they belong here.

Strangers cost little: at most MAX_STRANGERS are being greeted at a time (the oldest goes when one more comes),
none for longer than the greeting's limit, and they take no place of a member. One named thread accepts, one per
connection greets and serves; both live in blocking calls.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from allranks.channel.handshake import GREETING_S, ChannelError, greet_as_server
from allranks.channel.keys import Keyring

log = logging.getLogger("allranks.channel")

MAX_STRANGERS = 64
MAX_MEMBERS = 1024
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_DEAD = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_FULL_PAUSE_S = 0.05


@dataclass(eq=False)
class MemberServer:
    """`serve(connection, purpose)` runs in a thread of its own and may detach the connection to keep it."""

    keys: Keyring
    kind: str  # first word of the purposes that are served
    serve: Callable[[socket.socket, str], None]
    name: str = "allranks-server"  # of its threads
    greeting_s: float = GREETING_S
    proves: str = ""  # the name that clients expect in our proof
    _listener: socket.socket | None = None
    _strangers: dict[socket.socket, None] = field(default_factory=dict)  # being greeted; oldest first
    _members: set[socket.socket] = field(default_factory=set)
    _threads: set[threading.Thread] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def start(self, listener: socket.socket) -> None:
        """Accepts from a socket that listens, which is ours from now on."""
        self._listener = listener
        self._spawn(self._accept, "server", listener)

    def close(self) -> None:
        """Stops listening, cuts every connection, waits for the threads."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _cut(listener)
            listener.close()
        with self._lock:
            connections, threads = [*self._strangers, *self._members], list(self._threads)
        for connection in connections:
            _cut(connection)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._listener is not listener:
                    return
                if error.errno in _DEAD:
                    log.error("%s: nobody can connect any more: %s", self.name, error)
                    return
                if error.errno in _FULL:  # no descriptor is free: strangers go first, then we try again
                    self._drop_oldest()
                    time.sleep(_FULL_PAUSE_S)
                continue
            with self._lock:
                self._strangers[connection] = None
                crowded = len(self._strangers) > MAX_STRANGERS
            if crowded:
                self._drop_oldest()
            try:
                self._spawn(self._greet, "member", connection)
            except RuntimeError:  # no thread can be started
                self._forget(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            purpose = greet_as_server(connection, self.keys, self.kind, self.proves, self.greeting_s)
            with self._lock:
                self._strangers.pop(connection, None)
                if len(self._members) >= MAX_MEMBERS or self._listener is None:
                    return
                self._members.add(connection)
            self.serve(connection, purpose)
        except (OSError, ChannelError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("%s: a connection ended: %s", self.name, error)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._members.discard(connection)
        connection.close()

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is not None:
                del self._strangers[oldest]
                _cut(oldest)  # its thread closes it

    def _spawn(self, target: Callable[[socket.socket], None], role: str, sock: socket.socket) -> None:
        thread = threading.Thread(
            target=self._run, args=(target, sock), name=f"{self.name}-{role}", daemon=True
        )
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads.discard(thread)
            raise

    def _run(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        try:
            target(sock)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
