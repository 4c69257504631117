"""A call that nothing can interrupt, made so that its caller can walk away from it.

Runs in a rank. gloo waits for a member that should call us without holding a socket that could be cut, and torch's
store goes on trying an address that is dead. Such a call runs in a thread of its own: whoever abandons it frees
the caller at once, and what the call makes after that is discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def _forget(made: object) -> None:
    """Discards what needs no care."""


@dataclass(eq=False)
class AbandonableCall(Generic[T]):
    """One call. `abandon` may come from any thread, before, during or after it."""

    make: Callable[[], T]
    discard: Callable[[T], None] = _forget  # of what was made too late; on the call's own thread
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _made: list[T] = field(default_factory=list)
    _failure: BaseException | None = None
    _abandoned: BaseException | None = None

    def result(self) -> T:
        """What was made; raises what the call raised, or what it was abandoned with. Limits are the call's own."""
        threading.Thread(target=self._run, name="allranks-making", daemon=True).start()
        with self._changed:
            while not (self._made or self._failure or self._abandoned):
                self._changed.wait()
            if self._made:
                return self._made.pop()
            raise self._abandoned or self._failure or RuntimeError("unreachable")

    def abandon(self, error: BaseException) -> None:
        """Ends the waiting with this error, unless the call is through."""
        with self._changed:
            self._abandoned = self._abandoned or error
            self._changed.notify_all()

    def _run(self) -> None:
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(self.make())
        except BaseException as error:
            failure = error
        with self._changed:
            late = self._abandoned is not None
            if not late:
                self._made, self._failure = made, failure
            self._changed.notify_all()
        if late and made:
            self.discard(made.pop())
