"""A promise that the client's thread keeps: the answer to a join or to a command."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TypeVar

from allranks.errors import LighthouseError

T = TypeVar("T")


class PendingAnswer(Future[T]):
    """Resolved once, with a value or an error. Safe to wait for from any thread but the client's own."""

    def __init__(self, on_timeout: Callable[[PendingAnswer[T], float], LighthouseError]) -> None:
        super().__init__()
        self._on_timeout = on_timeout

    def result(self, timeout: float | None = None) -> T:
        """The answer. Raises the error it ended with; at the limit it gives up and says who was waited for."""
        if not self.wait(timeout):
            self.fail(self._on_timeout(self, timeout or 0.0))
        return super().result()

    def cancel(self) -> bool:
        """Gives up waiting; the lighthouse is told."""
        given_up = not self.done()
        if given_up:
            self.fail(self._on_timeout(self, 0.0))
        return given_up

    def wait(self, timeout_s: float | None) -> bool:
        """Waits without giving up; whether there is an answer."""
        return bool(wait((self,), timeout_s).done)

    def resolve(self, value: T) -> None:
        """Keeps the promise; only the first answer counts."""
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: LighthouseError) -> None:
        """Breaks it."""
        with suppress(InvalidStateError):
            self.set_exception(error)
