"""When a rank became slow: change points of its lateness against the other ranks. Pure.

What slows all ranks alike (longer inputs, a larger batch, evaluation) is not in the lateness; what slows one rank once (a save,
a pause) does not move a median. So an alarm means that one rank became slower and stayed slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

BEFORE, AFTER = 30, 30  # steps: what is compared
MIN_SHARE = 0.05  # of the others' time
NOISES = 4.0
LASTING = 0.7  # of the later steps are slow
LATE = 0.3  # of the change: so late it is at least


@dataclass(frozen=True)
class ChangePoint:
    rank: int
    index: int  # of the first slow step
    at: float  # epoch seconds
    share: float  # how much slower, of the others' own time

    @property
    def sentence(self) -> str:
        clock = time.strftime("%H:%M:%S", time.gmtime(self.at))
        return f"rank {self.rank} became slow at {clock} UTC by {self.share:.0%}"


def find_change(late: np.ndarray, others: np.ndarray, at: np.ndarray, rank: int) -> ChangePoint | None:
    """The first lasting change for the worse. `late`: own time less that of the others, for each step; `others`: theirs."""
    if len(late) < BEFORE + AFTER:
        return None
    share = np.where(others > 0, late / np.maximum(others, 1e-9), 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(share, BEFORE + AFTER)
    before, after = windows[:, :BEFORE], windows[:, BEFORE:]
    low = np.median(before, axis=1)
    noise = np.median(np.abs(before - low[:, None]), axis=1) * 1.4826
    high = np.median(after, axis=1)
    gain = high - low
    slow = (after > (low + gain / 2)[:, None]).mean(axis=1)
    large = gain >= np.maximum(MIN_SHARE, NOISES * noise / np.sqrt(AFTER / 4))
    # where the others became fast again, it is not late
    found = np.flatnonzero(large & (slow >= LASTING) & (high >= LATE * gain))
    if not len(found):
        return None
    at_least = float(gain[found[0] : found[0] + AFTER // 2].max())  # when the slow steps fill the window
    level = low[found[0]] + at_least / 2
    first = (
        int(found[0])
        + BEFORE // 2
        + int(np.argmax(_smooth(share[found[0] + BEFORE // 2 : found[0] + BEFORE + AFTER]) > level))
    )
    return ChangePoint(rank, first, float(at[first]), at_least)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The median of each value and its neighbours: one odd step does not begin a change."""
    padded = np.pad(values, 2, mode="reflect")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return found
