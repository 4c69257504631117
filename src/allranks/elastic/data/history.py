"""Which world trained which steps, and so which positions of the global order each step has. Pure.

One cursor runs through the global order; a step takes the next `sum(shares)` positions and deals them to the
ranks in order. Whoever the ranks are, the cursor only moves forward: nothing is lost, nothing is seen twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Segment:
    """From `first_step` on, rank r takes `shares[r]` samples per step; `position` is the cursor at that step."""

    first_step: int
    shares: tuple[int, ...]
    position: int

    @property
    def per_step(self) -> int:
        return sum(self.shares)


@dataclass(frozen=True)
class History:
    """Segments by first step; the first begins at step 0."""

    segments: tuple[Segment, ...] = ()

    def at(self, step: int) -> Segment:
        """The segment that a step belongs to."""
        found = bisect_right(self.segments, step, key=lambda segment: segment.first_step)
        return self.segments[max(0, found - 1)]

    def position(self, step: int) -> int:
        """The cursor before a step: how many samples all steps before it have taken."""
        if not self.segments:
            return 0
        segment = self.at(step)
        return segment.position + (step - segment.first_step) * segment.per_step

    def span(self, step: int, rank: int) -> tuple[int, int]:
        """(first position, count) of one rank in a step."""
        shares = self.at(step).shares
        return self.position(step) + sum(shares[:rank]), shares[rank]

    def change(self, step: int, shares: Sequence[int]) -> History:
        """The history in which these shares hold from `step` on; what was planned after it is forgotten."""
        new = tuple(shares)
        before = tuple(segment for segment in self.segments if segment.first_step < step)
        if before and before[-1].shares == new:
            return History(before)
        position = History(before).position(step)
        return History((*before, Segment(step, new, position)))

    def to_list(self) -> list[Any]:
        """Plain lists; equal neighbours in shares are counted, not repeated."""
        return [
            [segment.first_step, [[share, len(list(same))] for share, same in groupby(segment.shares)]]
            for segment in self.segments
        ]

    @staticmethod
    def from_list(rows: list[Any]) -> History:
        """The inverse of `to_list`."""
        history = History()
        for first_step, runs in rows:
            shares = [share for share, times in runs for _ in range(times)]
            history = history.change(first_step, shares)
        return history
