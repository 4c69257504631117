"""Compares the calls of each collective across ranks. Fast path: equal signatures need no look; the rest go by the rules of
`cells.py`. Calls inside coalesced batches lie between the entries that stand for whole batches. Pure.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnosis.cells import Cells, Mismatch
from allranks.diagnosis.job import GroupView, Job, Lane
from allranks.diagnosis.ops import is_p2p

#: Cells (ranks x collectives) examined at once; bounds memory.
CHUNK_CELLS = 2_000_000


def find_mismatches(job: Job) -> list[Mismatch]:
    """At most one per group: the earliest."""
    found = []
    for group in job.groups:
        suspects = suspect_seqs(job, group)
        mismatches = [_first(job, group, suspects) if len(suspects) else None, _in_batches(job, group)]
        known = [mismatch for mismatch in mismatches if mismatch is not None]
        found += sorted(known, key=lambda mismatch: mismatch.seq)[:1]
    return found


def _in_batches(job: Job, group: GroupView) -> Mismatch | None:
    """The first call inside a coalesced batch that does not fit, or batch of another number of calls."""
    if not any(job.ranks[rank].has_batches for rank in group.lanes):
        return None
    batches = Batches(job, group)
    suspects = suspect_seqs(job, batches.group)
    first = _first(job, batches.group, suspects) if len(suspects) else None
    uneven = batches.uneven()
    if first is not None and (uneven is None or batches.sequence(first.seq)[0] <= uneven[0]):
        seq, part = batches.sequence(first.seq)
        return replace(first, seq=seq, part=part, rows=batches.rows(first.seq))
    if uneven is None:
        return None
    ordered = sorted(uneven[1].items(), key=lambda item: (-len(item[1]), item[1]))
    texts = tuple(
        (f"a batch of {count} call{'s' if count > 1 else ''}", tuple(ranks)) for count, ranks in ordered
    )
    return Mismatch(group.index, uneven[0], "type_mismatch", texts)


def suspect_seqs(job: Job, group: GroupView) -> np.ndarray:
    """Sequence numbers at which two ranks have different signatures. Linear in the number of calls of those lanes
    that are not known to be alike."""
    lanes = distinct([lane for lane in group.lanes.values() if len(lane.seqs)])
    if len(lanes) < 2 or (lanes[0].kin is not None and all(lane.kin == lanes[0].kin for lane in lanes)):
        return np.zeros(0, np.int64)
    top = max(lane.last for lane in lanes)
    low = max(min(lane.first for lane in lanes), top - 2 * max(len(lane.seqs) for lane in lanes))
    reference = np.full(top - low + 1, -1, np.int64)
    odd = np.zeros(top - low + 1, bool)
    known = (-1, -1)  # reference is filled in between, without a hole
    for lane in lanes:
        start = int(np.searchsorted(lane.seqs, low))
        sigs = job.ranks[lane.rank].sig[lane.rows[start:] if start else lane.rows]
        if len(sigs):
            known = _compare_lane(reference, odd, lane.seqs[start:] - low, sigs, known)
    return np.flatnonzero(odd) + low


def _compare_lane(
    reference: np.ndarray, odd: np.ndarray, at: np.ndarray, sigs: np.ndarray, known: tuple[int, int]
) -> tuple[int, int]:
    """Marks where a lane differs from what is known, and adds what is not; where `reference` is filled now."""
    first, end = int(at[0]), int(at[-1]) + 1
    if end - first != len(sigs):
        _compare(reference, odd, at, sigs)
        return known
    if known[0] <= first and end <= known[1]:
        different = reference[first:end] != sigs
        if different.any():
            odd[first:end] |= different
        return known
    _compare(reference, odd, slice(first, end), sigs)
    touches = known[0] >= 0 and first <= known[1] and end >= known[0]
    return (min(first, known[0]), max(end, known[1])) if touches else (first, end)


def distinct(lanes: list[Lane]) -> list[Lane]:
    """Of lanes that are alike and of one extent only the first."""
    found: dict[object, Lane] = {}
    for lane in lanes:
        found.setdefault((lane.kin, lane.first, lane.last) if lane.kin is not None else lane.rank, lane)
    return list(found.values())


def _compare(reference: np.ndarray, odd: np.ndarray, here: slice | np.ndarray, sigs: np.ndarray) -> None:
    """Marks where a lane differs from what is known, and adds what is not known yet."""
    known = reference[here]
    odd[here] |= (known != sigs) & (known >= 0)
    reference[here] = np.where(known >= 0, known, sigs)


def _first(job: Job, group: GroupView, suspects: np.ndarray) -> Mismatch | None:
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    width = max(1, CHUNK_CELLS // len(lanes))
    first: Mismatch | None = None
    also = 0
    for start in range(0, len(suspects), width):
        cells = Cells.gather(job, group, suspects[start : start + width])
        bad = cells.bad_columns()
        also += len(bad)
        if first is None and len(bad):
            first = cells.explain(int(bad[0]))
    return None if first is None else replace(first, also=also - 1)


#: Calls of one batch that are distinguished.
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
            seqs, numbers = np.unique(keys // MAX_CALLS, return_counts=True)
            for seq, count in zip(seqs.tolist(), numbers.tolist(), strict=True):
                counts.setdefault(seq, {}).setdefault(count, []).append(rank)
        return next(((seq, counts[seq]) for seq in sorted(counts) if len(counts[seq]) > 1), None)


def known_inside(job: Job, group: GroupView, rank: int, row: int) -> bool:
    """Whether the ring shows what is in the batch that this row stands for."""
    rows, _ = _parts(job, group, group.lanes[rank])
    seqs = job.ranks[rank].trace.calls["seq"]
    return bool(((rows < row) & (seqs[rows] == seqs[row])).any())


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
