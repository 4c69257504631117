"""Waits between nodes: each agent notes how long its node waited in collectives with ranks of other nodes; the reader of the
ledgers of all nodes compares them. Pure.

Of each collective the agent notes the shortest time that one of its ranks was inside: that rank came last of its node. The
node whose rank was inside for the shortest time is the one that the others waited for; no clocks are compared. Of many
collectives some are noted, the same ones on every node.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from allranks.ledger.arrivals import find_lanes, overlaps
from allranks.ledger.records import USEFUL, WAITING, Booked, Passed
from allranks.model.trace import RankTrace

MANY, FEW = 64, 4  # collectives that are noted of a window of ten seconds, and of a long one
SHORT_S, FOR_S = 600.0, 5000.0  # of long windows one is noted, and then none for so long
MIN_SHARE = 0.002  # of a window
RECENT_S = 30.0  # what nodes are compared by while the job runs
LOOKS, SLOW_LOOKS, SLOW_SHARE = (
    60,
    3,
    0.05,
)  # that are remembered; that must all be slow, by so much of the time
Key = TypeVar("Key")


def note_passed(traces: Sequence[RankTrace], begin: float, end: float) -> Passed | None:
    """What this node's ranks did in collectives with other nodes; None when there were none."""
    since, until = int(begin * 1e9), int(end * 1e9)
    inside: dict[
        int, tuple[float, int, int]
    ] = {}  # collective -> seconds, rank that came last, ranks of this node
    for (name, ranks), lane in find_lanes(traces, since, until).items():
        if set(ranks) <= lane.keys():
            continue  # all of it is on this node
        group = (zlib.crc32(f"{name} {ranks}".encode()) & 0x1FFFFF) << 32
        for rank, (trace, rows) in lane.items():
            rows = rows[~overlaps(trace)[rows] & (trace.calls["completed_ns"][rows] > 0)]
            took = (trace.calls["completed_ns"][rows] - trace.calls["created_ns"][rows]) / 1e9
            for seq, seconds in zip(trace.calls["seq"][rows], took, strict=True):
                shortest, last, number = inside.get(group | int(seq), (np.inf, rank, 0))
                first = (float(seconds), rank) if seconds < shortest else (shortest, last)
                inside[group | int(seq)] = (*first, number + 1)
    if not inside:
        return None
    chosen = choose(inside, int(min(MANY, max(FEW, 10 * MANY / max(end - begin, 1e-9)))))
    return Passed(
        round(begin, 4), round(end, 4), len(inside), chosen,
        [round(inside[key][0] * 1e6) for key in chosen], [inside[key][1] for key in chosen],
        [inside[key][2] for key in chosen],
    )  # fmt: skip


def choose(keys: Collection[int], most: int) -> list[int]:
    """At most so many of them, by their own number: another node with the same keys chooses the same."""
    marked = sorted((key * 2654435761 & 0xFFFFFFFF, key) for key in keys)
    limit = 1 << 32
    while sum(mark < limit for mark, _ in marked) > most:
        limit >>= 1
    return sorted(key for mark, key in marked if mark < limit)


def join_nodes(
    passed: Sequence[Sequence[Passed]], rows: Sequence[Mapping[Key, Booked]]
) -> Iterator[tuple[int, Key, dict[str, float]]]:
    """(node, row, its seconds with the waits for other nodes) of rows that waited; both arguments are by node."""
    first: dict[int, tuple[int, int]] = {}  # collective -> shortest time, rank
    seen: dict[int, int] = defaultdict(int)
    for notes in passed:
        for one in notes:
            for key, inside, rank in zip(one.keys, one.inside_us, one.last, strict=True):
                first[key] = min(first.get(key, (inside, rank)), (inside, rank))
                seen[key] += 1
    for node, notes in enumerate(passed):
        shares = [_lost(one, first, seen) for one in notes]
        begins = [one.begin - 1e-3 for one in notes]
        for place, row in rows[node].items() if any(shares) else ():
            number = bisect_right(begins, row.begin) - 1
            if number >= 0 and shares[number] and row.begin < notes[number].end + FOR_S:
                yield node, place, _book(row, shares[number])


def _lost(one: Passed, first: Mapping[int, tuple[int, int]], seen: Mapping[int, int]) -> dict[int, float]:
    """Rank of another node -> share of the time that each rank of this node waited for it."""
    members, known = max(one.ranks, default=1), 0
    found: dict[int, float] = {}
    for key, inside, last, ranks in zip(one.keys, one.inside_us, one.last, one.ranks, strict=True):
        if seen[key] > 1:
            known += 1
            shortest, rank = first[key]
            if rank != last:
                found[rank] = found.get(rank, 0.0) + (inside - shortest) * ranks
    scale = one.calls / max(known, 1) / max(one.end - one.begin, 1e-9) / members / 1e6
    return {rank: lost * scale for rank, lost in found.items() if lost * scale >= MIN_SHARE}


def _book(row: Booked, lost: Mapping[int, float]) -> dict[str, float]:
    """A row's useful time, less what was spent waiting for other nodes."""
    seconds = dict(row.seconds)
    useful, total = seconds.get(USEFUL, 0.0), sum(seconds.values())
    waited = {rank: share * total for rank, share in lost.items()}
    scale = min(1.0, useful / max(sum(waited.values()), 1e-9))
    for rank, time in waited.items():
        state = f"{WAITING}:{rank}"
        seconds[state] = seconds.get(state, 0.0) + time * scale
    seconds[USEFUL] = useful - sum(waited.values()) * scale
    return seconds


@dataclass
class NodeLateness:
    """How much later each node comes than the others, look by look. In the agent that has the first rank of the job."""

    _shares: dict[str, list[float]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def add(self, notes: Mapping[str, Passed]) -> list[tuple[str, int, float]]:
        """With the newest notes of all nodes: (node, its rank that came last, share of the time) of nodes that became slow
        and stayed slow, each once."""
        common = (
            sorted(set.intersection(*(set(one.keys) for one in notes.values()))) if len(notes) > 1 else []
        )
        if len(common) < FEW:
            return []
        inside = {name: dict(zip(one.keys, one.inside_us, strict=True)) for name, one in notes.items()}
        table = np.array([[inside[name][key] for key in common] for name in notes])
        found = []
        for number, (name, one) in enumerate(notes.items()):
            late = np.median(np.delete(table, number, axis=0), axis=0) - table[number]
            share = float(np.median(late)) / 1e6 * one.calls / max(one.end - one.begin, 1e-9)
            shares = self._shares[name] = [*self._shares.get(name, ()), share][-LOOKS:]
            before, lately = shares[:-SLOW_LOOKS], shares[-SLOW_LOOKS:]
            if name not in self._told and len(before) >= 2 * SLOW_LOOKS:
                gain = min(lately) - float(np.median(before))
                if gain >= SLOW_SHARE:
                    self._told.add(name)
                    found.append((name, max(set(one.last), key=one.last.count), gain))
        return found
