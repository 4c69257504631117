"""Coalesced batches of collectives: their calls, found between the entries that stand for whole batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.job import GroupView, Job, Lane
from allranks.diagnose.ops import is_p2p

#: Calls of one batch that are told apart.
MAX_CALLS = 1 << 16


class Batches:
    """The calls inside the batches of one group, as a group of their own: a number per (batch, place in it)."""

    def __init__(self, job: Job, group: GroupView) -> None:
        parts = {
            rank: _parts(job, group, lane)
            for rank, lane in group.lanes.items()
            if job.ranks[rank].has_batches
        }
        self.parts = {rank: found for rank, found in parts.items() if len(found[0])}
        keys = [keys for _, keys in self.parts.values()]
        self._keys = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
        lanes = {rank: self._lane(group.lanes[rank], *found) for rank, found in self.parts.items()}
        self.group = replace(group, lanes=lanes)

    def _lane(self, lane: Lane, rows: np.ndarray, keys: np.ndarray) -> Lane:
        return Lane.of(lane.rank, rows, np.searchsorted(self._keys, keys), lane.wrapped, lane.cut)

    def sequence(self, number: int) -> tuple[int, int]:
        """(sequence number of the batch, which call of it, from 1) of one of our numbers."""
        key = int(self._keys[number])
        return key // MAX_CALLS, key % MAX_CALLS + 1

    def rows(self, number: int) -> tuple[tuple[int, int], ...]:
        """(rank, row) of one of our numbers."""
        found = ((rank, lane.row(number)) for rank, lane in self.group.lanes.items())
        return tuple((rank, row) for rank, row in found if row >= 0)

    def uneven(self) -> tuple[int, dict[int, list[int]]] | None:
        """The first batch in which ranks made different numbers of calls: its number, and the ranks by how many."""
        counts: dict[int, dict[int, list[int]]] = {}
        if len({keys.tobytes() for _, keys in self.parts.values()}) < 2:
            return None
        for rank, (_, keys) in self.parts.items():
            for seq, count in zip(
                *(a.tolist() for a in np.unique(keys // MAX_CALLS, return_counts=True)), strict=True
            ):
                counts.setdefault(seq, {}).setdefault(count, []).append(rank)
        return next(((seq, counts[seq]) for seq in sorted(counts) if len(counts[seq]) > 1), None)


def known_inside(job: Job, group: GroupView, rank: int, row: int) -> bool:
    """Whether the ring shows what is in the batch that this row stands for."""
    rows, _ = _parts(job, group, group.lanes[rank])
    return bool(
        (
            (rows < row)
            & (job.ranks[rank].trace.calls["seq"][rows] == job.ranks[rank].trace.calls["seq"][row])
        ).any()
    )


def _parts(job: Job, group: GroupView, lane: Lane) -> tuple[np.ndarray, np.ndarray]:
    """(rows, keys) of the calls that lie before the entry of their batch and bear its number."""
    none = np.zeros(0, np.int64), np.zeros(0, np.int64)
    view = job.ranks[lane.rank]
    if not len(lane.rows):
        return none
    mine = np.flatnonzero((view.group == group.index) & ~is_p2p(view.family))
    mine = mine[~np.isin(mine, lane.rows)]
    at = np.searchsorted(lane.rows, mine)
    # The oldest batch of a ring that has wrapped may have lost its first calls.
    inside = (at < len(lane.rows)) & (at >= int(lane.wrapped))
    mine, at = mine[inside], at[inside]
    same = view.trace.calls["seq"][mine] == lane.seqs[at]
    mine, at = mine[same], at[same]
    if not len(mine):
        return none
    starts = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    place = np.arange(len(mine)) - np.repeat(starts, np.diff(np.append(starts, len(mine))))
    keep = place < MAX_CALLS
    return mine[keep], (lane.seqs[at] * MAX_CALLS + place)[keep]
