"""The calls of each collective compared across ranks: which do not fit together, and who differs. Pure.

Equal signatures need no look. For the rest, what must be equal depends on the operation: uneven all_gather, reduce_scatter and
all_to_all are valid as long as what all ranks give adds up to what each takes. Elements count, not shapes: [4, 4] meets [16].
Calls inside coalesced batches lie between the entries that stand for whole batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from allranks.diagnosis.job import (
    EVEN_ONLY,
    REDUCING,
    ROOTED,
    TENSOR_BY_TENSOR,
    Family,
    GroupView,
    Job,
    Lane,
    is_p2p,
)
from allranks.diagnosis.kinds import say
from allranks.model.trace import REDUCE_OPS

#: Cells (ranks x collectives) examined at once; bounds memory.
CHUNK_CELLS = 2_000_000
#: Calls of one batch that are distinguished.
MAX_CALLS = 1 << 16
#: Above this many ranks only the totals of an all_to_all are compared: the table of pairs would be too large.
MAX_RANKS = 2048


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

    def minority(self) -> tuple[int, ...] | None:
        """The ranks outside the largest class, or None when two or more are the largest."""
        if len(self.classes) > 1 and len(self.classes[0][1]) == len(self.classes[1][1]):
            return None
        return tuple(sorted(rank for _, ranks in self.classes[1:] for rank in ranks))


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
    for lane in lanes:
        start = int(np.searchsorted(lane.seqs, low))
        sigs, here = job.ranks[lane.rank].sig[lane.rows[start:]], lane.seqs[start:] - low
        known = reference[here]
        odd[here] |= (known != sigs) & (known >= 0)
        reference[here] = np.where(known >= 0, known, sigs)
    return np.flatnonzero(odd) + low


def distinct(lanes: list[Lane]) -> list[Lane]:
    """Of lanes that are alike and of one extent only the first."""
    found: dict[object, Lane] = {}
    for lane in lanes:
        found.setdefault((lane.kin, lane.first, lane.last) if lane.kin is not None else lane.rank, lane)
    return list(found.values())


def _first(job: Job, group: GroupView, suspects: np.ndarray) -> Mismatch | None:
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    width = max(1, CHUNK_CELLS // len(lanes))
    first: Mismatch | None = None
    also = 0
    for start in range(0, len(suspects), width):
        cells = Cells.gather(job, group, suspects[start : start + width])
        bad = [column for column in range(len(cells.seqs)) if cells.broken_rule(column) is not None]
        also += len(bad)
        if first is None and bad:
            first = cells.explain(bad[0])
    return None if first is None else replace(first, also=also - 1)


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
        dtypes = _dtype_numbers(job)
        for i, lane in enumerate(lanes):
            at = np.searchsorted(lane.seqs, seqs)
            at[at >= len(lane.seqs)] = 0
            here = lane.seqs[at] == seqs
            rows = lane.rows[at[here]]
            view = job.ranks[lane.rank]
            calls = view.trace.calls
            row[i, here] = rows
            columns["family"][i, here] = view.family[rows]
            columns["dtype"][i, here] = dtypes[(view.sig[rows] >> 24) & 0x7FFFFFF]
            for name, field in (("given", "in_numel"), ("taken", "out_numel")):
                columns[name][i, here] = calls[field][rows]
            for name in ("root", "reduce_op"):
                columns[name][i, here] = calls[name][rows]
        ranks = np.array([lane.rank for lane in lanes])[:, None]
        columns["root"] = _own_roots(columns, ranks, len(group.members))
        return Cells(job, group, ranks[:, 0].tolist(), seqs, row, **columns)

    def explain(self, column: int) -> Mismatch:
        """The broken rule of a bad column, with the ranks sorted by what they did."""
        cause = self.broken_rule(column)
        assert cause is not None
        kind, aspect, keys = cause
        here = self.row[:, column] >= 0
        ranks = [rank for rank, is_here in zip(self.ranks, here, strict=True) if is_here]
        classes: dict[object, list[int]] = {}
        for rank, key in zip(ranks, keys.tolist(), strict=True):
            classes.setdefault(key, []).append(rank)
        ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[1]))
        texts = tuple((self._class_text(kind, column, members), tuple(members)) for _, members in ordered)
        pairs = self._pairs(column) if aspect == "split" else False
        known = pairs if isinstance(pairs, Exchange) else None
        return Mismatch(self.group.index, int(self.seqs[column]), kind, texts, 0, aspect, known)

    def _class_text(self, kind: str, column: int, ranks: list[int]) -> str:
        """What the ranks of one class did: true of every one of them, also where [4, 4] stands beside [16]."""
        texts = list(dict.fromkeys(self._words(kind, column, rank) for rank in ranks))
        return " or ".join(texts[:3]) + (f" or {len(texts) - 3} others" if len(texts) > 3 else "")

    def broken_rule(self, c: int) -> tuple[str, str, np.ndarray] | None:
        """(cause, aspect, key per present rank) of the first broken rule of a column, or None."""
        here = self.row[:, c] >= 0
        family = self.family[here, c]
        if (family != family[0]).any():
            return "type_mismatch", "", family
        if (sizes := self._size_keys(c, here, int(family[0]))) is not None:
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
            return self._spread(c, given, taken, complete, ("input", "output"))
        if family == Family.REDUCE_SCATTER:
            return self._spread(c, taken, given, complete, ("output", "input"))
        if family == Family.ALL_TO_ALL and complete and (given > 0).any() and (taken > 0).any():
            return self._exchange(c, given, taken)
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
        self, c: int, part: np.ndarray, whole: np.ndarray, complete: bool, sides: tuple[str, str]
    ) -> tuple[str, np.ndarray] | None:
        """all_gather (and reduce_scatter turned round): every rank's part, everybody's whole, on these sides."""
        if _differ(whole):
            return sides[1], whole
        if not _differ(part):
            return None
        i = int(np.flatnonzero(self.row[:, c] >= 0)[0])
        rank, row = self.ranks[i], int(self.row[i, c])
        shapes = self.job.shapes(rank, row)
        # Only lists of tensors, one for each rank, may be uneven.
        even_only = self.job.op(rank, row) in EVEN_ONLY or len(shapes.inputs) == len(shapes.outputs) == 1
        if even_only or (complete and (whole > 0).all() and int(part.sum()) != int(whole[0])):
            return sides[0], part
        return None

    def _exchange(self, c: int, given: np.ndarray, taken: np.ndarray) -> tuple[str, np.ndarray] | None:
        """all_to_all: what r gives k must be what k takes of r, where splits are known; totals otherwise."""
        fits = self._pairs(c)
        if fits is True or (fits is False and int(given.sum()) == int(taken.sum())):
            return None
        return "split", given * (1 << 20) + taken

    def _pairs(self, c: int) -> Exchange | bool:
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
            root = int(self.root[i, column])
            recorded = int(self.job.ranks[rank].trace.calls["root"][row]) >= 0
            return f"root {root}" if recorded else "itself as the root" if root >= 0 else "an unknown root"
        if kind == "reduce_op_mismatch":
            code = int(self.reduce_op[i, column])
            return REDUCE_OPS[code] if code < len(REDUCE_OPS) else "other"
        if shapes.inputs == shapes.outputs:
            return f"size {sizes_text(shapes.inputs)}"
        return f"in {sizes_text(shapes.inputs)} out {sizes_text(shapes.outputs)}"


def _own_roots(columns: dict[str, np.ndarray], ranks: np.ndarray, size: int) -> np.ndarray:
    """The roots; where they are not recorded, a rank that takes for all in a gather, or gives to all in a scatter, is the root by
    its own account."""
    family, given, taken = (columns[name] for name in ("family", "given", "taken"))
    gathers = (family == int(Family.GATHER)) & (given > 0) & (taken == given * size)
    roots = (gathers | ((family == int(Family.SCATTER)) & (taken > 0) & (given == taken * size))) & (size > 1)
    found: np.ndarray = np.where((columns["root"] < 0) & roots, ranks, columns["root"])
    return found


def _dtype_numbers(job: Job) -> np.ndarray:
    """Shapes number → number of its dtypes; 0 unknown."""
    ids: dict[tuple[str, ...], int] = {(): 0}
    words = (tuple(dict.fromkeys(s.input_dtypes or s.output_dtypes)) for s in job.tables.shapes)
    return np.array([ids.setdefault(each, len(ids)) for each in words], np.int64)


def sizes_text(sizes: tuple[tuple[int, ...], ...]) -> str:
    """[3, 4] for one tensor, 5 tensors shown at most."""
    shown = [str(list(size)) for size in sizes[:5]]
    more = f" and {len(sizes) - 5} more" if len(sizes) > 5 else ""
    return (" ".join(shown) or "[]") + more


def _differ(values: np.ndarray) -> bool:
    known = values[values >= 0]
    return len(known) > 1 and bool((known != known[0]).any())


@dataclass(frozen=True)
class SplitPair:
    """One rank gives another something else than that one expects of it, in elements."""

    giver: int
    taker: int
    given: int
    expected: int


@dataclass(frozen=True)
class Exchange:
    """The pairs of an all_to_all that disagree. Several suspects: nothing tells which of them is wrong."""

    pairs: tuple[SplitPair, ...]
    suspects: tuple[int, ...]
    confidence: float
    reason: str


def compare_splits(job: Job, rows: dict[int, int], order: Sequence[int]) -> Exchange | bool:
    """The pairs that disagree; True when all agree, False when splits are not known on all ranks."""
    size = len(order)
    splits = [_splits(job, rank, rows[rank], size) for rank in order] if size <= MAX_RANKS else [None]
    known = [pair for pair in splits if pair is not None]
    if len(known) < size:
        return False
    gives, takes = np.array([pair[0] for pair in known]), np.array([pair[1] for pair in known])
    wrong = np.argwhere(gives != takes.T).tolist()
    if not wrong:
        return True
    pairs = tuple(SplitPair(order[i], order[k], int(gives[i, k]), int(takes[k, i])) for i, k in wrong)
    sums = zip(gives.sum(axis=1).tolist(), takes.sum(axis=1).tolist(), strict=True)
    return Exchange(pairs, *_suspects(pairs, dict(zip(order, sums, strict=True))))


def _suspects(
    pairs: tuple[SplitPair, ...], totals: dict[int, tuple[int, int]]
) -> tuple[tuple[int, ...], float, str]:
    """(ranks, confidence, reason). A rank in every disagreeing pair explains them all."""
    sides = [{pair.giver, pair.taker} for pair in pairs]
    common = sorted(set.intersection(*sides))
    if len(common) == 1:
        return tuple(common), 0.9, say("all_pairs", one=len(pairs) == 1, number=len(pairs))
    if not common:
        return _cover(sides), 0.6, say("covering")
    usual, count = Counter(totals.values()).most_common(1)[0]
    odd = [rank for rank in common if totals[rank] != usual]
    if len(odd) == 1 and count * 2 > len(totals):
        return tuple(odd), 0.85, say("other_totals", number=count, total=len(totals))
    return tuple(common), 0.5, say("two_disagree")


def _cover(sides: list[set[int]]) -> tuple[int, ...]:
    """Few ranks that together take part in all pairs; those that are in the most pairs first."""
    found: list[int] = []
    while sides:
        counts = Counter(rank for side in sides for rank in side)
        most = max(counts.values())
        found.append(min(rank for rank, count in counts.items() if count == most))
        sides = [side for side in sides if found[-1] not in side]
    return tuple(sorted(found))


def _splits(job: Job, rank: int, row: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(elements to each rank, elements from each rank); None when not recorded."""
    shapes = job.shapes(rank, row)
    even = job.ranks[rank].trace.is_box  # our recorder keeps splits: a call without them has equal ones
    gives = _elements(shapes.inputs, shapes.input_splits, size, even)
    takes = _elements(shapes.outputs, shapes.output_splits, size, even)
    return (gives, takes) if gives and takes else None


def _elements(
    tensors: tuple[tuple[int, ...], ...], splits: tuple[int, ...], size: int, even: bool
) -> tuple[int, ...]:
    """Elements per partner of one side of a call; () when unknown. Splits count rows of the one tensor."""
    if len(tensors) == size and size > 1:
        return tuple(map(prod, tensors))
    if len(tensors) != 1 or not tensors[0]:
        return ()
    rows, width = tensors[0][0], prod(tensors[0][1:])
    if not splits and even and rows % size == 0:
        return (rows // size * width,) * size
    return tuple(split * width for split in splits) if len(splits) == size else ()
