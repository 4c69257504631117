"""A small event loop over selectors, and its sockets, for the client's thread and the liveness proxy.

Not asyncio: the loop must survive forks of the rank, need no policy and start fast (docs/decisions.md). Everything runs on
the thread that calls `run()`, except `call`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from allranks.channel.frames import READ_BYTES, BadFrame, check_length, take_frames
from allranks.lighthouse.detect import AwakeClock

log = logging.getLogger("allranks.lighthouse")

MAX_FRAME = 256 << 20
MAX_FDS = 250  # of one message; the kernel's limit is 253


class ReactorTimer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """Watches file descriptors and timers until `stop()`."""

    def __init__(self) -> None:
        self.clock = AwakeClock(max_step_s=2.0)
        self._selector: selectors.BaseSelector | None = None
        self._wake_read = self._wake_write = -1
        self._timers: list[tuple[float, int, ReactorTimer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._stopped = False

    def open(self) -> None:
        """Opens the selector and the wake-up pipe."""
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def close(self) -> None:
        """Closes both. Call it on the thread that ran, or in a forked child."""
        with self._lock:
            selector, self._selector = self._selector, None
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
        if selector is not None:
            selector.close()
            os.close(read)
            os.close(write)

    def watch(self, fd: int, callback: Callable[[int], None], write: bool = False) -> None:
        """Calls `callback(events)` when `fd` is readable (`write`: or writable); replaces an earlier watch."""
        if self._selector is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(fd, events, callback)
        except KeyError:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Stops watching `fd`. Call it before closing the descriptor."""
        if self._selector is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(fd)

    def later(self, delay_s: float, callback: Callable[[], None]) -> ReactorTimer:
        timer = ReactorTimer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def call(self, callback: Callable[[], object]) -> None:
        """Runs `callback` on the reactor's thread. Safe from any thread."""
        with self._lock:
            self._calls.append(callback)
            if self._wake_write >= 0:
                with suppress(BlockingIOError):  # the pipe is full of wake-ups
                    os.write(self._wake_write, b"x")

    def stop(self) -> None:
        """Ends `run()`. Safe from any thread."""
        self._stopped = True
        self.call(lambda: None)

    def run(self) -> None:
        """Runs until stopped. A callback that raises is logged; the others still run."""
        while not self._stopped:
            self._turn()

    def _turn(self) -> None:
        if self._selector is None:
            self._stopped = True
            return
        wait = 1.0
        if self._timers:
            wait = min(wait, max(0.0, self._timers[0][0] - time.monotonic()))
        ready = self._selector.select(wait)
        now = time.monotonic()
        self.clock.tick(now)
        for key, events in ready:
            self._guard(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
        while self._calls and not self._stopped:
            self._guard(self._calls.popleft())
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self._guard(timer.callback)

    def _guard(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:
            log.exception("a callback of the lighthouse client failed")

    def _woken(self, events: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


class FrameSocket:
    """A connected socket with a send queue; received frames are passed on one by one.

    A local socket also carries descriptors: `send` takes them over, received ones are in `fds`. The reactor calls
    `lost(error)` once; the error is None when the other side has closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        receive: Callable[[int, bytes], None],
        lost: Callable[[Exception | None], None],
    ) -> None:
        sock.setblocking(False)
        self.sock: socket.socket | None = sock
        self.limit = MAX_FRAME  # bytes of an incomplete frame
        self.heard = reactor.clock.now  # when the last bytes arrived
        self.fds: list[int] = []
        self._reactor, self._receive, self._lost = reactor, receive, lost
        self._again: tuple[type[OSError], ...] = (BlockingIOError, InterruptedError)
        self._secure = hasattr(sock, "context")
        if self._secure:
            import ssl

            self._again += (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self._local = sock.family == socket.AF_UNIX
        self._broken = False  # sending has failed
        self._in = bytearray()
        self._out: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()  # data and its descriptors
        reactor.watch(sock.fileno(), self._ready, write=True)

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        self._out.append((data, fds))
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes now."""
        sock = self.sock
        if sock is None:
            return
        write = False
        try:
            while self._out:
                data, fds = self._out[0]
                sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
                self._out.popleft()
                for fd in fds:
                    os.close(fd)
                if sent < len(data):
                    self._out.appendleft((memoryview(data)[sent:], ()))
        except self._again as error:  # during a TLS handshake we may have to read first
            write = type(error).__name__ != "SSLWantReadError"
        except OSError as error:  # not now: a sender does not expect a callback
            self._broken = True
            self._reactor.later(0.0, partial(self._end, error))
            return
        self._reactor.watch(sock.fileno(), self._ready, write)

    def close(self) -> None:
        """Ends the connection and drops the send queue."""
        sock, self.sock = self.sock, None
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        if sock is not None:
            self._reactor.forget(sock.fileno())
            sock.close()

    def abandon(self) -> None:
        """Makes `close` reset the connection: an orderly close would mean that this process has ended."""
        if self.sock is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _ready(self, events: int) -> None:
        self.flush()
        if self._broken:
            return
        try:
            closed = self._read()
        except OSError as error:
            self._end(error)
            return
        try:
            for kind, payload in take_frames(self._in, MAX_FRAME):
                if self.sock is not None:
                    self._receive(kind, payload)
            check_length(len(self._in), self.limit)
        except BadFrame as error:
            self._end(error)
        if closed:
            self._end(None)

    def _read(self) -> bool:
        """Reads what has arrived; True when the other side has closed."""
        while self.sock is not None:
            fds: list[int] = []
            try:
                if self._local:
                    data, fds, _, _ = socket.recv_fds(self.sock, READ_BYTES, MAX_FDS)
                else:
                    data = self.sock.recv(READ_BYTES)
            except self._again:
                break
            self.fds += fds
            if not data:
                return True
            self.heard = self._reactor.clock.now
            self._in += data
            if len(data) < READ_BYTES and not self._secure:
                break
        return False

    def _end(self, error: Exception | None) -> None:
        if self.sock is not None:
            self._lost(error)
