"""Compares the calls of each collective across ranks. Fast path: equal signatures need no look; the rest go by rules.

What must be equal depends on the operation: uneven all_gather, reduce_scatter and all_to_all are valid as long as
what all ranks give adds up to what each takes. Elements count, not shapes: [4, 4] meets [16].
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from allranks.diagnose.batches import Batches
from allranks.diagnose.exchange import Exchange, compare_splits
from allranks.diagnose.job import GroupView, Job, Lane
from allranks.diagnose.ops import EVEN_ONLY, REDUCING, ROOTED, TENSOR_BY_TENSOR, Family
from allranks.model.trace import REDUCE_OPS

#: Cells (ranks x collectives) examined at once; bounds memory.
CHUNK_CELLS = 2_000_000


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group whose calls do not fit together, and how many later ones do not either."""

    group: int
    seq: int
    cause: str
    classes: tuple[tuple[str, tuple[int, ...]], ...]  # (what they did, ranks), largest class first
    also: int = 0  # later collectives of this group that do not fit either
    aspect: str = ""  # "input", "output", "split" for sizes
    exchange: Exchange | None = None  # of an all_to_all whose splits are known
    part: int = 0  # which call of a coalesced batch, from 1; 0: the collective itself
    rows: tuple[tuple[int, int], ...] = ()  # (rank, row) of that call


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
        seqs = suspects[start : start + width]
        cells = Cells.gather(job, group, seqs)
        for column in cells.bad_columns():
            if first is None:
                first = cells.explain(int(column))
            else:
                also += 1
    if first is None:
        return None
    return replace(first, also=also)


@dataclass
class Cells:
    """The calls of some collectives of one group: rows are ranks, columns are sequence numbers."""

    job: Job
    group: GroupView
    ranks: list[int]
    seqs: np.ndarray
    row: np.ndarray  # row of the call in its rank's trace; -1 absent
    family: np.ndarray
    given: np.ndarray  # elements; -1 unknown
    taken: np.ndarray
    dtype: np.ndarray  # number of the dtypes; 0 unknown
    root: np.ndarray
    reduce_op: np.ndarray

    @staticmethod
    def gather(job: Job, group: GroupView, seqs: np.ndarray) -> Cells:
        """Fetches the columns of all ranks that have calls in the group."""
        lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
        shape = (len(lanes), len(seqs))
        row = np.full(shape, -1, np.int64)
        empty = {"family": 0, "given": -1, "taken": -1, "dtype": 0, "root": -1, "reduce_op": 0}
        columns = {name: np.full(shape, value, np.int64) for name, value in empty.items()}
        dtypes = DtypeNumbers(job)
        for i, lane in enumerate(lanes):
            at = np.searchsorted(lane.seqs, seqs)
            at[at >= len(lane.seqs)] = 0
            here = lane.seqs[at] == seqs
            rows = lane.rows[at[here]]
            view = job.ranks[lane.rank]
            calls = view.trace.calls
            row[i, here] = rows
            columns["family"][i, here] = view.family[rows]
            columns["given"][i, here] = calls["in_numel"][rows]
            columns["taken"][i, here] = calls["out_numel"][rows]
            columns["dtype"][i, here] = dtypes.of((view.sig[rows] >> 24) & 0x7FFFFFF)
            columns["root"][i, here] = calls["root"][rows]
            columns["reduce_op"][i, here] = calls["reduce_op"][rows]
        return Cells(job, group, [lane.rank for lane in lanes], seqs, row, **columns)

    def bad_columns(self) -> np.ndarray:
        """Columns that break a rule."""
        return np.flatnonzero(np.array([self._cause(c) is not None for c in range(len(self.seqs))], bool))

    def explain(self, column: int) -> Mismatch:
        """The broken rule of a bad column, with the ranks sorted by what they did."""
        cause = self._cause(column)
        assert cause is not None
        kind, aspect, keys = cause
        here = self.row[:, column] >= 0
        ranks = [rank for rank, is_here in zip(self.ranks, here, strict=True) if is_here]
        classes: dict[object, list[int]] = {}
        for rank, key in zip(ranks, keys.tolist(), strict=True):
            classes.setdefault(key, []).append(rank)
        ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[1]))
        texts = tuple((self._class_text(kind, column, members), tuple(members)) for _, members in ordered)
        exchange = self.exchange(column) if aspect == "split" else False
        known = exchange if isinstance(exchange, Exchange) else None
        return Mismatch(self.group.index, int(self.seqs[column]), kind, texts, 0, aspect, known)

    def _class_text(self, kind: str, column: int, ranks: list[int]) -> str:
        """What the ranks of one class did: true of every one of them, also where [4, 4] stands beside [16]."""
        texts = list(dict.fromkeys(self._words(kind, column, rank) for rank in ranks))
        return " or ".join(texts[:3]) + (f" or {len(texts) - 3} others" if len(texts) > 3 else "")

    def _cause(self, c: int) -> tuple[str, str, np.ndarray] | None:
        """(cause, aspect, key per present rank) of the first broken rule of a column, or None."""
        here = self.row[:, c] >= 0
        family = self.family[here, c]
        if (family != family[0]).any():
            return "type_mismatch", "", family
        sizes = self._size_keys(c, here, int(family[0]))
        if sizes is not None:
            return "size_mismatch", sizes[0], sizes[1]
        rules: list[tuple[str, np.ndarray, int]] = [("dtype_mismatch", self.dtype, 1)]
        rules += [("root_mismatch", self.root, 0)] if int(family[0]) in ROOTED else []
        rules += [("reduce_op_mismatch", self.reduce_op, 1)] if int(family[0]) in REDUCING else []
        for cause, column, lowest in rules:
            values = column[here, c]
            known = values[values >= lowest]
            if len(known) > 1 and (known != known[0]).any():
                return cause, "", values
        return None

    def _size_keys(self, c: int, here: np.ndarray, family: int) -> tuple[str, np.ndarray] | None:
        given, taken = self.given[here, c], self.taken[here, c]
        tensors = self._tensors(c, here)
        if tensors is not None and _differ(tensors):
            return "input", tensors
        known = self.group.members_known or not self.job.missing_ranks
        complete = known and int(here.sum()) == len(self.group.members)
        if family in (Family.ALL_REDUCE, Family.BROADCAST, Family.REDUCE, Family.GATHER):
            return ("input", given) if _differ(given) else None
        if family == Family.SCATTER:
            return ("output", taken) if _differ(taken) else None
        if family == Family.ALL_GATHER:
            return self._spread(c, here, given, taken, complete, ("input", "output"))
        if family == Family.REDUCE_SCATTER:
            return self._spread(c, here, taken, given, complete, ("output", "input"))
        if family == Family.ALL_TO_ALL and complete and (given > 0).any() and (taken > 0).any():
            return self._exchange(c, here, given, taken)
        return None

    def _tensors(self, c: int, here: np.ndarray) -> np.ndarray | None:
        """For calls with several tensors that must be equal one by one: a number for their sizes."""
        rows = [(self.ranks[i], int(self.row[i, c])) for i in np.flatnonzero(here).tolist()]
        if self.job.op(*rows[0]) not in TENSOR_BY_TENSOR:
            return None
        ids: dict[tuple[int, ...], int] = {}
        sizes = [tuple(map(prod, self.job.shapes(rank, row).inputs)) for rank, row in rows]
        return np.array([ids.setdefault(size, len(ids)) if size else -1 for size in sizes])

    def _spread(
        self,
        c: int,
        here: np.ndarray,
        part: np.ndarray,
        whole: np.ndarray,
        complete: bool,
        sides: tuple[str, str],
    ) -> tuple[str, np.ndarray] | None:
        """all_gather (and reduce_scatter turned round): every rank's part, everybody's whole, on these sides."""
        if _differ(whole):
            return sides[1], whole
        if not _differ(part):
            return None
        i = int(np.flatnonzero(here)[0])
        rank, row = self.ranks[i], int(self.row[i, c])
        shapes = self.job.shapes(rank, row)
        # Only lists of tensors, one for each rank, may be uneven.
        even_only = self.job.op(rank, row) in EVEN_ONLY or len(shapes.inputs) == len(shapes.outputs) == 1
        if even_only or (complete and (whole > 0).all() and int(part.sum()) != int(whole[0])):
            return sides[0], part
        return None

    def _exchange(
        self, c: int, here: np.ndarray, given: np.ndarray, taken: np.ndarray
    ) -> tuple[str, np.ndarray] | None:
        """all_to_all: what r gives k must be what k takes of r, where splits are known; totals otherwise."""
        fits = self.exchange(c)
        if fits is True or (fits is False and int(given.sum()) == int(taken.sum())):
            return None
        return "split", given * (1 << 20) + taken

    def exchange(self, c: int) -> Exchange | bool:
        """Which pairs of an all_to_all disagree; True: none, False: the splits are not known."""
        rows = {rank: int(self.row[i, c]) for i, rank in enumerate(self.ranks)}
        return compare_splits(self.job, rows, self.group.order)

    def _words(self, kind: str, column: int, rank: int) -> str:
        """What one rank did, in the terms of the broken rule."""
        i = bisect_left(self.ranks, rank)
        row = int(self.row[i, column])
        shapes = self.job.shapes(rank, row)
        if kind == "type_mismatch":
            return self.job.op(rank, row)
        if kind == "dtype_mismatch":
            return "/".join(dict.fromkeys(shapes.input_dtypes or shapes.output_dtypes)) or "unknown dtype"
        if kind == "root_mismatch":
            return f"root {int(self.root[i, column])}"
        if kind == "reduce_op_mismatch":
            code = int(self.reduce_op[i, column])
            return REDUCE_OPS[code] if code < len(REDUCE_OPS) else "other"
        return f"in {sizes_text(shapes.inputs)} out {sizes_text(shapes.outputs)}"


class DtypeNumbers:
    """Shapes number → number of its dtypes; 0 unknown."""

    def __init__(self, job: Job) -> None:
        ids: dict[tuple[str, ...], int] = {(): 0}
        table = []
        for shapes in job.tables.shapes:
            words = tuple(dict.fromkeys(shapes.input_dtypes or shapes.output_dtypes))
            table.append(ids.setdefault(words, len(ids)))
        self._table = np.array(table, np.int64)

    def of(self, shapes: np.ndarray) -> np.ndarray:
        numbers: np.ndarray = self._table[shapes]
        return numbers


def sizes_text(sizes: tuple[tuple[int, ...], ...]) -> str:
    """[3, 4] for one tensor, 5 tensors shown at most."""
    shown = [str(list(size)) for size in sizes[:5]]
    more = f" and {len(sizes) - 5} more" if len(sizes) > 5 else ""
    return (" ".join(shown) or "[]") + more


def majority(mismatch: Mismatch) -> tuple[int, ...] | None:
    """The ranks outside the largest class, or None when there is no single largest one."""
    sizes = Counter(len(ranks) for _, ranks in mismatch.classes)
    largest = max(sizes)
    if sizes[largest] > 1:
        return None
    return tuple(sorted(rank for _, ranks in mismatch.classes[1:] for rank in ranks))


def _differ(values: np.ndarray) -> bool:
    known = values[values >= 0]
    return len(known) > 1 and bool((known != known[0]).any())
