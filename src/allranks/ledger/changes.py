"""When a rank became slow: change points of its lateness against the other ranks. Pure.

Longer inputs, a larger batch or an evaluation slow all ranks and do not show in the lateness. A single save or pause does not
move a median. So a change point means that one rank became slower and stayed slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

BEFORE, AFTER = 45, 36  # steps that are compared
MIN_SHARE = 0.05  # of the others' time
SURE = 5.0  # standard errors
PARTS = 3  # parts of the later steps, all of which must be slow
LATE = 0.3  # least lateness afterwards, as a share of the change


@dataclass(frozen=True)
class ChangePoint:
    rank: int
    index: int  # of the first slow step
    at: float  # epoch seconds
    share: float  # slowdown as a share of the others' own time

    @property
    def sentence(self) -> str:
        clock = time.strftime("%H:%M:%S", time.gmtime(self.at))
        return f"rank {self.rank} became slow at {clock} UTC by {self.share:.0%}"


def find_change(late: np.ndarray, others: np.ndarray, at: np.ndarray, rank: int) -> ChangePoint | None:
    """The first lasting slowdown. `late` is the rank's own time less `others`, that of the other ranks, per step."""
    if len(late) < BEFORE + AFTER:
        return None
    share = np.where(others > 0, late / np.maximum(others, 1e-9), 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(share, BEFORE + AFTER)
    before, after = windows[:, :BEFORE], windows[:, BEFORE:]
    low, high = np.median(before, axis=1), np.median(after, axis=1)
    gain = high - low
    # a rank is not late if only the others became faster
    found = np.flatnonzero((gain >= MIN_SHARE) & (high >= LATE * gain))
    error = _error(before[found] - low[found, None], after[found] - high[found, None])
    parts = [np.median(part, axis=1) for part in np.array_split(after[found], PARTS, axis=1)]
    lasts = np.min(parts, axis=0) > (low + gain / 2)[found]
    found = found[lasts & (gain[found] >= SURE * error)]
    if not len(found):
        return None
    at_least = float(gain[found[0] : found[0] + AFTER // 2].max())  # when the slow steps fill the window
    half = low[found[0]] + at_least / 2
    first = (
        int(found[0])
        + BEFORE // 2
        + int(np.argmax(_smooth(share[found[0] + BEFORE // 2 : found[0] + BEFORE + AFTER]) > half))
    )
    return ChangePoint(rank, first, float(at[first]), at_least)


def _error(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The standard error of the difference of medians, from deviations (windows x values). Correlated steps count as fewer."""
    noises = [np.median(np.abs(one), axis=1) * 1.4826 for one in (before, after)]
    cut = [
        one.clip(-3 * noise[:, None], 3 * noise[:, None])
        for one, noise in zip((before, after), noises, strict=True)
    ]
    rest = np.concatenate(cut, axis=1)
    rest = rest - rest.mean(axis=1, keepdims=True)
    alike = (rest[:, 1:] * rest[:, :-1]).sum(axis=1) / np.maximum((rest**2).sum(axis=1), 1e-12)
    alike = alike.clip(0.0, 0.9)
    error: np.ndarray = (
        1.2533
        * np.sqrt(noises[0] ** 2 / BEFORE + noises[1] ** 2 / AFTER)
        * np.sqrt((1 + alike) / (1 - alike))
    )
    return error


def _smooth(values: np.ndarray) -> np.ndarray:
    """Median over five steps, so that one odd step does not begin a change."""
    padded = np.pad(values, 2, mode="reflect")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return found
