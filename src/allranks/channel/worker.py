"""One thread that makes blocking calls for other threads. Runs in the agent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

log = logging.getLogger("allranks.agent")

MAX_WAITING = 256


def carefully(work: Callable[[], object], problem: str, *values: object) -> bool:
    """Makes a call at a thread's entry, or into foreign code; logs any exception. Whether it succeeded."""
    try:
        work()
    except Exception:
        log.exception(problem, *values)
        return False
    return True


class Worker:
    """Makes calls in order, on a thread that starts with the first one. `put` may be called from any thread.

    Of two waiting calls with one key only the newer is made. Beyond `limit` the oldest is dropped and logged.
    """

    def __init__(self, name: str, limit: int = MAX_WAITING) -> None:
        self.name = name
        self._limit = limit
        self._waiting: dict[Hashable, Callable[[], object]] = {}
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object], key: Hashable = None) -> None:
        """Queues a call and returns at once. Ignored after `close`."""
        with self._changed:
            if self._closed:
                return
            key = object() if key is None else key
            self._waiting.pop(key, None)
            if len(self._waiting) >= self._limit:
                self._waiting.pop(next(iter(self._waiting)))
                log.warning("%s: more than %d calls wait; the oldest is dropped", self.name, self._limit)
            self._waiting[key] = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Whether all calls were made within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Makes the waiting calls within the time; whether all were made."""
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) if done else 0.0)
        return done

    def _run(self) -> None:
        while (work := self._next()) is not None:
            carefully(work, "%s: a call failed", self.name)

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.pop(next(iter(self._waiting)))
