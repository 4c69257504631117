"""A clock that counts only the time during which this process ran.

Silence counts only while the lighthouse could hear: after the machine or the process was stopped, heartbeats lie
unread in socket buffers, and every replica would seem dead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AwakeClock:
    """Seconds during which this process ran. One step adds at most `max_step_s`.

    The owner calls `tick(monotonic)` at least every `max_step_s / 2`. The awake time of a recent moment is its
    monotonic time minus `slept_s`.
    """

    max_step_s: float = 0.5
    now: float = 0.0
    slept_s: float = 0.0  # not counted so far
    _last: float | None = None

    def tick(self, monotonic: float) -> float:
        """Advances to this time and returns the awake time."""
        if self._last is not None:
            over = monotonic - self._last - self.max_step_s
            if over > 0:
                self.slept_s += over
        self._last = monotonic
        self.now = monotonic - self.slept_s
        return self.now
