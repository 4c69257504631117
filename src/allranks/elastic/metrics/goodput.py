"""Goodput: useful time over all time, and what stole the rest. Pure: the clock is an argument.

Useful is the time of steps that count. A step that is done again after a restore was useless the first time:
`redo` moves its time from useful to "redone".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 10_000  # step times kept for `redo`


@dataclass
class Goodput:
    """Seconds by name. Time that nobody claimed is "other"."""

    started_s: float = 0.0
    useful_s: float = 0.0
    stolen_s: dict[str, float] = field(default_factory=dict)  # checkpoint, recovery, data, redone, ...
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add_step(self, step: int, seconds: float) -> None:
        """A finished step."""
        self.useful_s += seconds
        self._steps.append((step, seconds))

    def add_stolen(self, what: str, seconds: float) -> None:
        """Time in which nothing was learned."""
        self.stolen_s[what] = self.stolen_s.get(what, 0.0) + seconds

    def redo(self, from_step: int) -> None:
        """Training goes back: steps from `from_step` on will be done again."""
        while self._steps and self._steps[-1][0] >= from_step:
            _, seconds = self._steps.pop()
            self.useful_s -= seconds
            self.add_stolen("redone", seconds)

    def shares(self, now_s: float) -> dict[str, float]:
        """What part of all time went where; "useful" first, they sum to 1."""
        total = max(now_s - self.started_s, 1e-9)
        named = self.useful_s + sum(self.stolen_s.values())
        shares = {"useful": self.useful_s / total}
        shares.update({what: seconds / total for what, seconds in sorted(self.stolen_s.items())})
        shares["other"] = max(0.0, total - named) / total
        return shares

    def ratio(self, now_s: float) -> float:
        """Useful time over all time."""
        return self.useful_s / max(now_s - self.started_s, 1e-9)
