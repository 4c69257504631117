"""all_to_all with known splits: which pairs of ranks disagree, and which rank that points to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from allranks.diagnose.align import is_box
from allranks.diagnose.job import Job

#: Above this many ranks only totals are compared: the table of pairs would be too large.
MAX_RANKS = 2048


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
    totals = dict(
        zip(order, zip(gives.sum(axis=1).tolist(), takes.sum(axis=1).tolist(), strict=True), strict=True)
    )
    return Exchange(pairs, *_suspects(pairs, totals))


def _suspects(
    pairs: tuple[SplitPair, ...], totals: dict[int, tuple[int, int]]
) -> tuple[tuple[int, ...], float, str]:
    """(ranks, confidence, reason). A rank in every disagreeing pair explains them all."""
    sides = [{pair.giver, pair.taker} for pair in pairs]
    common = sorted(set.intersection(*sides))
    if len(common) == 1:
        return (
            tuple(common),
            0.9,
            f"it takes part in {_all(len(pairs))} that disagree, and no other rank does",
        )
    if not common:
        return _cover(sides), 0.6, "together these ranks take part in all pairs that disagree"
    usual, count = Counter(totals.values()).most_common(1)[0]
    odd = [rank for rank in common if totals[rank] != usual]
    if len(odd) == 1 and count * 2 > len(totals):
        return tuple(odd), 0.85, f"{count} of {len(totals)} ranks give and take the same totals, it does not"
    return tuple(common), 0.5, "only these two disagree, and nothing tells which of them is wrong"


def _all(count: int) -> str:
    return "the one pair" if count == 1 else f"all {count} pairs"


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
    even = is_box(job.ranks[rank].trace)  # our recorder keeps splits: a call without them has equal ones
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
