"""Waits between nodes: each agent records how long its ranks were inside collectives with other nodes, and the reader of all
ledgers compares them. Pure.

For each collective the agent records the shortest time inside, which is that of its node's last rank. The node with the
shortest time of all is the one that the others waited for; no clocks are compared. Agents record a sample of the collectives,
the same on every node.
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

MANY, FEW = 64, 4  # collectives recorded per window of ten seconds, and per long window
SHORT_S, FOR_S = 600.0, 5000.0  # a window longer than SHORT_S is recorded at most once per FOR_S
MIN_SHARE = 0.002  # of a window
RECENT_S = 30.0  # of the running job, for comparing nodes
# comparisons kept per node; that many in a row must be slow, by this share of the time
KEPT, SLOW_IN_A_ROW, SLOW_SHARE = 60, 3, 0.05
Key = TypeVar("Key")


def note_passed(traces: Sequence[RankTrace], begin: float, end: float) -> Passed | None:
    """The times of this node's ranks in collectives with other nodes; None when there were none."""
    since, until = int(begin * 1e9), int(end * 1e9)
    # collective -> seconds, last rank, ranks of this node
    inside: dict[int, tuple[float, int, int]] = {}
    for (name, ranks), lane in find_lanes(traces, since, until).items():
        if set(ranks) <= lane.keys():
            continue  # the whole group is on this node
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
    """At most `most` keys, chosen by their hash so that every node with the same keys chooses the same."""
    marked = sorted((key * 2654435761 & 0xFFFFFFFF, key) for key in keys)
    limit = 1 << 32
    while sum(mark < limit for mark, _ in marked) > most:
        limit >>= 1
    return sorted(key for mark, key in marked if mark < limit)


def join_nodes(
    passed: Sequence[Sequence[Passed]], rows: Sequence[Mapping[Key, Booked]]
) -> Iterator[tuple[int, Key, dict[str, float]]]:
    """(node, row, its seconds with the waits for other nodes) for rows that waited. Both arguments are by node."""
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
        for at, row in rows[node].items() if any(shares) else ():
            number = bisect_right(begins, row.begin) - 1
            if number >= 0 and shares[number] and row.begin < notes[number].end + FOR_S:
                yield node, at, _book(row, shares[number])


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
    """The row's seconds, with waits for other nodes taken from its useful time."""
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
    """How much later each node comes than the others, over time. In the agent of rank 0."""

    _shares: dict[str, list[float]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def add(self, notes: Mapping[str, Passed]) -> list[tuple[str, int, float]]:
        """Takes the newest notes of all nodes; returns (node, its last rank, share of the time) of nodes that became slow and
        stayed slow, each once."""
        if len(notes) < 2:
            return []
        common = sorted(set.intersection(*(set(one.keys) for one in notes.values())))
        if len(common) < FEW:
            return []
        inside = {name: dict(zip(one.keys, one.inside_us, strict=True)) for name, one in notes.items()}
        table = np.array([[inside[name][key] for key in common] for name in notes])
        found = []
        for number, (name, one) in enumerate(notes.items()):
            late = np.median(np.delete(table, number, axis=0), axis=0) - table[number]
            share = float(np.median(late)) / 1e6 * one.calls / max(one.end - one.begin, 1e-9)
            shares = self._shares[name] = [*self._shares.get(name, ()), share][-KEPT:]
            before, lately = shares[:-SLOW_IN_A_ROW], shares[-SLOW_IN_A_ROW:]
            if name not in self._reported and len(before) >= 2 * SLOW_IN_A_ROW:
                gain = min(lately) - float(np.median(before))
                if gain >= SLOW_SHARE:
                    self._reported.add(name)
                    found.append((name, max(set(one.last), key=one.last.count), gain))
        return found
