"""Who is silent. Pure, except that AwakeClock is fed by its owner.

Silence only counts while the lighthouse itself was awake to hear: after the machine or the process stood
still, heartbeats lie unread in socket buffers and everybody would look dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Heard(Protocol):
    """Anything that was heard at some time."""

    heard: float


H = TypeVar("H", bound=Heard)


@dataclass
class AwakeClock:
    """Seconds during which this process was running. Never jumps: one step adds at most `max_step_s`.

    The awake time of a moment just passed is its monotonic time minus `slept_s`. `tick(monotonic)` is called at least every `max_step_s / 2` by the owner's timer.
    """

    max_step_s: float = 0.5
    now: float = 0.0
    slept_s: float = 0.0  # time taken out of the count so far
    _last: float | None = None

    def tick(self, monotonic: float) -> float:
        """Moves on and returns the new time."""
        if self._last is not None:
            over = monotonic - self._last - self.max_step_s
            if over > 0:
                self.slept_s += over
        self._last = monotonic
        self.now = monotonic - self.slept_s
        return self.now


def find_silent(now: float, sources: Iterable[H], timeout_s: float) -> tuple[list[H], float]:
    """Those not heard for `timeout_s`, and the earliest time at which to look again."""
    silent, oldest = [], now
    limit = now - timeout_s
    for source in sources:
        heard = source.heard
        if heard <= limit:
            silent.append(source)
        elif heard < oldest:
            oldest = heard
    return silent, oldest + timeout_s
