"""The calls of two ranks side by side, made comparable. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allranks.diagnose.job import GroupView, Job, Lane
from allranks.diagnose.shift import keys


def differences(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Per call of the shorter: whether the two differ."""
    length = min(len(mine), len(theirs))
    differences: np.ndarray = mine[:length] != theirs[:length]
    return differences


@dataclass(frozen=True)
class CallPair:
    """The calls of two ranks in one group from the first number that both know."""

    rank: int
    reference: int
    low: int  # sequence number of index 0
    mine: np.ndarray
    theirs: np.ndarray
    my_steps: np.ndarray
    their_steps: np.ndarray
    their_lines: np.ndarray
    one_line: np.ndarray  # per number that both know: whether they called from the same line

    @staticmethod
    def of(job: Job, group: GroupView, rank: int, reference: int) -> CallPair | None:
        """None when a number is missing in between or the two know no common call."""
        lanes = group.lanes[rank], group.lanes[reference]
        low = max(lane.first for lane in lanes)
        parts = [calls_from(job, lane, low) for lane in lanes]
        if any(part is None for part in parts):
            return None
        (mine, my_steps, my_lines), (theirs, their_steps, their_lines) = (p for p in parts if p is not None)
        one_line = ~differences(my_lines, their_lines)
        return CallPair(rank, reference, low, mine, theirs, my_steps, their_steps, their_lines, one_line)

    @staticmethod
    def over_groups(job: Job, group: GroupView, rank: int, reference: int) -> CallPair | None:
        """All calls of the two, of any group, from the first call of this group that both know; indices count from 0.

        A group of one rank is taken for the group of the other that it made at the same point of its program.
        """
        views = job.ranks[rank], job.ranks[reference]
        lanes = group.lanes[rank], group.lanes[reference]
        low = max(lane.first for lane in lanes)
        starts = [lane.row(low) for lane in lanes]
        if all(len(view.trace.calls) and int(view.trace.calls["begin"][0]) == 1 for view in views):
            starts = [0, 0]
        if min(starts) < 0:
            return None
        parts = []
        for view, start in zip(views, starts, strict=True):
            calls = view.trace.calls[start:]
            whose = calls["group"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            key = (
                view.sig[start:].astype(np.uint64)
                ^ (view.stack[start:].astype(np.uint64) << np.uint64(20))
                ^ whose
            )
            parts.append((key, calls["step"].astype(np.int64), view.stack[start:]))
        (mine, my_steps, my_lines), (theirs, their_steps, their_lines) = parts
        return CallPair(
            rank,
            reference,
            starts[1],
            mine,
            theirs,
            my_steps,
            their_steps,
            their_lines,
            ~differences(my_lines, their_lines),
        )


def calls_from(job: Job, lane: Lane, low: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(what the calls are, their steps, their lines) of a lane from a number on; None when one is missing."""
    start = int(np.searchsorted(lane.seqs, low))
    rows = lane.rows[start:]
    if not len(rows) or int(lane.seqs[-1]) - low != len(rows) - 1:
        return None
    view = job.ranks[lane.rank]
    return keys(job, lane)[start:], view.trace.calls["step"][rows].astype(np.int64), view.stack[rows]
