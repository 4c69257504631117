"""What a rank has always done next: programs repeat themselves, and a step out of the round shows who left it."""

from __future__ import annotations

import numpy as np

from allranks.diagnose.job import RankView

_ODD = 0x9E3779B97F4A7C1  # spreads partners over all bits


def step_keys(view: RankView) -> np.ndarray:
    """One number per call of a rank, over all groups: equal when group, operation, sizes, partner and line are."""
    keys: np.ndarray = view.sig ^ (view.stack.astype(np.int64) << 20) ^ (view.group.astype(np.int64) << 44)
    if view.has_p2p:
        keys = keys ^ (view.trace.calls["peer"].astype(np.int64) + 1) * _ODD
    return keys


def successors(keys: np.ndarray, row: int) -> np.ndarray:
    """Rows that followed, in earlier rounds, the two calls before `row`; of one call when two never came before."""
    if row < 1:
        return np.zeros(0, np.int64)
    same: np.ndarray = np.flatnonzero(keys[: row - 1] == keys[row - 1]) + 1
    if row >= 2:
        twice = same[(same >= 2) & (keys[np.maximum(same - 2, 0)] == keys[row - 2])]
        same = twice if len(twice) else same
    return same[same < row]


def breaks_habit(view: RankView, row: int) -> bool:
    """Whether the call is none of those that followed at this point in earlier rounds."""
    keys = step_keys(view)
    usual = successors(keys, row)
    return len(usual) > 0 and not bool((keys[usual] == keys[row]).any())


def is_inserted(view: RankView, row: int) -> bool:
    """Whether the call was never made before, and right behind it comes what has always come here."""
    keys = step_keys(view)
    usual = successors(keys, row)
    if not len(usual) or row + 1 >= len(keys) or bool((keys[:row] == keys[row]).any()):
        return False
    return bool((keys[usual] == keys[row + 1]).any())
