"""A promise that the client's thread keeps: the answer to a join or to a command."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from allranks.errors import LighthouseError

T = TypeVar("T")


class PendingAnswer(Generic[T]):
    """Resolved once, with a value or an error. Safe to wait for from any thread but the client's own."""

    def __init__(self, on_timeout: Callable[[PendingAnswer[T], float], LighthouseError]) -> None:
        self._on_timeout = on_timeout
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: LighthouseError | None = None
        self._callbacks: list[Callable[[PendingAnswer[T]], None]] = []

    def done(self) -> bool:
        """Whether there is an answer."""
        return self._event.is_set()

    def result(self, timeout_s: float) -> T:
        """The answer. Raises the error it ended with; at the limit it gives up and says who was waited for."""
        if not self._event.wait(timeout_s):
            error = self._on_timeout(self, timeout_s)
            self.fail(error)
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def cancel(self) -> None:
        """Gives up waiting; the lighthouse is told."""
        if not self.done():
            self.fail(self._on_timeout(self, 0.0))

    def add_done_callback(self, callback: Callable[[PendingAnswer[T]], None]) -> None:
        """Calls `callback(ticket)` on the client's thread when there is an answer, or at once."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout_s: float) -> bool:
        """Waits without giving up; whether there is an answer."""
        return self._event.wait(timeout_s)

    def resolve(self, value: T) -> None:
        """Keeps the promise; only the first answer counts."""
        self._end(value, None)

    def fail(self, error: LighthouseError) -> None:
        """Breaks it."""
        self._end(None, error)

    def _end(self, value: T | None, error: LighthouseError | None) -> None:
        with self._lock:
            if self._event.is_set():
                return
            self._value, self._error = value, error
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
