"""A small event loop over selectors for one thread: the client's own, or the liveness proxy process.

asyncio would do, but not in a rank: its loop is a global of the thread, and the rank's thread must survive
forks, need no policy and start in no time. Everything runs on the thread that calls `run()`, except `call`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from allranks.lighthouse.detect import AwakeClock

log = logging.getLogger("allranks.lighthouse")


class ReactorTimer:
    """A planned call; `cancel()` makes it void."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Never call it."""
        self.callback = None


class Reactor:
    """Watches file descriptors and timers until `stop()`. Makes its descriptors in `open()`."""

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
        """Makes selector and wake-up pipe."""
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def close(self) -> None:
        """Closes them. Call it on the thread that ran, or after a fork in the child."""
        with self._lock:
            selector, self._selector = self._selector, None
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
        if selector is not None:
            selector.close()
            os.close(read)
            os.close(write)

    def watch(self, fd: int, callback: Callable[[int], None], write: bool = False) -> None:
        """Calls `callback(events)` when `fd` can be read (or written, if asked); replaces an earlier watch."""
        if self._selector is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        try:
            self._selector.modify(fd, events, callback)
        except KeyError:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Watches `fd` no more. Call it before closing the descriptor."""
        if self._selector is not None:
            try:
                self._selector.unregister(fd)
            except (KeyError, ValueError):
                pass

    def later(self, delay_s: float, callback: Callable[[], None]) -> ReactorTimer:
        """Calls back once after `delay_s`."""
        timer = ReactorTimer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def call(self, callback: Callable[[], object]) -> None:
        """Runs `callback` on the reactor's thread, soon. Safe from any thread."""
        with self._lock:
            self._calls.append(callback)
            if self._wake_write >= 0:
                try:
                    os.write(self._wake_write, b"x")
                except BlockingIOError:
                    pass  # enough wake-ups are on the way

    def stop(self) -> None:
        """Ends `run()`. Safe from any thread."""
        self._stopped = True
        self.call(lambda: None)

    def run(self) -> None:
        """Until stopped. A callback that raises is logged; the rest goes on."""
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
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass
