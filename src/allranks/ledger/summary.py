"""Sums the ledgers of a job's nodes: share of useful time, where the rest went, failures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from allranks.ledger.across import join_nodes
from allranks.ledger.file import NodeLedger
from allranks.ledger.records import (
    SAVING,
    STALLED,
    USEFUL,
    WAITING,
    Booked,
    Outage,
    Passed,
    RunEnd,
    RunStart,
    kind_of,
    ranks_in,
)

FAILURES = ("hang", "death", "partition")  # kinds of incidents that count for the time between failures
Seconds = dict[str, float]


@dataclass(frozen=True)
class JobAccount:
    """Where a job's time went. `seconds` are rank-seconds by state and add up to `rank_seconds`."""

    job: str
    begin: float
    end: float
    running_s: float  # time in which at least one agent ran it, over all its runs
    runs: int
    ranks: int
    seconds: Seconds
    by_node: dict[str, Seconds]
    by_rank: dict[int, Seconds]
    waiting_for: dict[int, float]  # rank -> rank-seconds that others waited for it
    stalled_by: dict[str, float]  # rank-seconds by incident
    outages: tuple[Outage, ...]
    rows: tuple[Booked, ...] = ()
    step: int = -1
    tokens: float = 0.0  # of all ranks, without repeated steps; 0: not reported by the script
    saves: dict[str, tuple[int, float]] = field(default_factory=dict)  # tier -> saves, seconds per save
    damaged: int = 0
    crashed: int = 0  # runs whose agent wrote no last record
    nodes: tuple[str, ...] = ()
    node_of: dict[int, str] = field(default_factory=dict)  # rank -> the node that booked it last

    @property
    def rank_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of useful time."""
        return self.seconds.get(USEFUL, 0.0) / max(self.rank_seconds, 1e-9)

    @property
    def failures(self) -> tuple[Outage, ...]:
        return tuple(one for one in self.outages if one.kind in FAILURES)

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures; None without one."""
        return self.running_s / len(self.failures) if self.failures else None

    def mean_s(self, since: str, until: str) -> float | None:
        """Mean time between two moments of a failure, over the failures that have both."""
        pairs = [(getattr(one, since), getattr(one, until)) for one in self.failures]
        known = [max(0.0, high - low) for low, high in pairs if low and high]
        return sum(known) / len(known) if known else None

    @property
    def by_cause(self) -> dict[str, tuple[int, float]]:
        """Cause -> (incidents, rank-seconds stalled), the most expensive first."""
        found: dict[str, tuple[int, float]] = {}
        for one in self.outages:
            number, lost = found.get(one.cause, (0, 0.0))
            found[one.cause] = number + 1, lost + self.stalled_by.get(one.id, 0.0)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


@dataclass
class _Node:
    name: str = ""
    spans: list[tuple[float, float]] = field(default_factory=list)
    rows: dict[tuple[int, int], Booked] = field(default_factory=dict)  # by (run, number)
    outages: dict[str, Outage] = field(default_factory=dict)
    passed: list[Passed] = field(default_factory=list)
    crashed: int = 0
    job: str = ""


def _read(ledger: NodeLedger) -> _Node:
    node, run, start, end, closed = _Node(), 0, 0.0, 0.0, True
    for one in ledger.records:
        if isinstance(one, Booked):  # nearly all of them
            node.rows.setdefault((run, one.number), one)
            if one.end > end:
                end = one.end
        elif isinstance(one, RunStart):
            if run:
                node.spans.append((start, end))
                node.crashed += not closed
            node.name, node.job, start, end, closed, run = one.node, one.job, one.at, one.at, False, run + 1
        elif isinstance(one, RunEnd):
            end, closed = max(end, one.at), True
        elif isinstance(one, Passed):
            node.passed.append(one)
        else:
            node.outages[one.id] = one
    node.spans.append((start, end))
    return node


def account(ledgers: Sequence[NodeLedger], since: float = 0.0, until: float = float("inf")) -> JobAccount:
    """The account of one job between `since` and `until`, from the ledgers of its nodes."""
    nodes = [_read(ledger) for ledger in ledgers]
    _book_waits(nodes)
    rows: list[Booked] = []
    sums: list[tuple[str, str, Seconds]] = []  # node, ranks
    for node in nodes:
        own = list(_within(node.rows.values(), since, until))
        rows += own
        sums += [(node.name, text, states) for text, states in _by_ranks(own).items()]
    seconds: Seconds = defaultdict(float)
    by_node: dict[str, Seconds] = defaultdict(lambda: defaultdict(float))
    by_rank: dict[int, Seconds] = defaultdict(lambda: defaultdict(float))
    waiting: dict[int, float] = defaultdict(float)
    stalled: dict[str, float] = defaultdict(float)
    node_of: dict[int, str] = {}
    for name, text, states in sums:
        ranks = ranks_in(text)
        node_of |= dict.fromkeys(ranks, name)
        for state, lost in states.items():
            kind, _, what = state.partition(":")
            seconds[kind] += lost
            by_node[name][kind] += lost
            for rank in ranks:
                by_rank[rank][kind] += lost / len(ranks)
            if kind == WAITING:
                waiting[int(what)] += lost
            elif kind == STALLED:
                stalled[what] += lost
    spans = _union((max(b, since), min(e, until)) for node in nodes for b, e in node.spans)
    outages: dict[str, Outage] = {}
    for node in nodes:
        outages |= {one.id: one for one in node.outages.values() if since <= one.begin < until}
    return JobAccount(
        job=next((node.job for node in nodes if node.job), ""),
        begin=min((b for b, _ in spans), default=0.0),
        end=max((e for _, e in spans), default=0.0),
        running_s=sum(e - b for b, e in spans),
        runs=max((len(node.spans) for node in nodes), default=0),
        ranks=len(by_rank),
        seconds=dict(seconds),
        by_node={name: dict(one) for name, one in by_node.items()},
        by_rank={rank: dict(by_rank[rank]) for rank in sorted(by_rank)},
        waiting_for=dict(sorted(waiting.items(), key=lambda item: -item[1])),
        stalled_by=dict(stalled),
        outages=tuple(sorted(outages.values(), key=lambda one: one.begin)),
        rows=tuple(rows),
        step=max((row.step for row in rows), default=-1),
        tokens=sum(row.tokens for row in rows),
        saves=_saves(nodes[0].rows.values()) if nodes else {},
        damaged=sum(ledger.damaged for ledger in ledgers),
        crashed=sum(node.crashed for node in nodes),
        nodes=tuple(sorted({node.name for node in nodes})),
        node_of=node_of,
    )


def _by_ranks(rows: Iterable[Booked]) -> dict[str, Seconds]:
    found: dict[str, Seconds] = {}
    for row in rows:
        total = found.setdefault(row.ranks, {})
        for state, lost in row.seconds.items():
            total[state] = total.get(state, 0.0) + lost
    return found


def _book_waits(nodes: Sequence[_Node]) -> None:
    """Books the waits for ranks of other nodes."""
    if sum(bool(node.passed) for node in nodes) < 2:
        return
    for number, key, seconds in list(join_nodes([n.passed for n in nodes], [n.rows for n in nodes])):
        rows = nodes[number].rows
        rows[key] = msgspec.structs.replace(rows[key], seconds=seconds)


def _saves(rows: Iterable[Booked]) -> dict[str, tuple[int, float]]:
    """Tier -> (saves, mean seconds per save), of the ranks of a node that saved most often."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    took: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        for state, number in row.counts.items():
            if kind_of(state) == SAVING:
                counts[state, row.ranks] += number
                took[state, row.ranks] += row.seconds.get(state, 0.0) / max(len(ranks_in(row.ranks)), 1)
    found: dict[str, tuple[int, float]] = {}
    for (state, ranks), number in counts.items():
        tier = state.partition(":")[2]
        if number > found.get(tier, (0, 0.0))[0]:
            found[tier] = number, took[state, ranks] / number
    return found


def _within(rows: Iterable[Booked], since: float, until: float) -> Iterable[Booked]:
    """The rows in this period; rows at its edges count in proportion."""
    if since <= 0.0 and until == float("inf"):
        yield from rows
        return
    for row in rows:
        share = overlap_share(row, since, until)
        if share >= 1.0:
            yield row
        elif share > 0.0:
            part = {state: lost * share for state, lost in row.seconds.items()}
            begin, end, tokens = max(row.begin, since), min(row.end, until), round(row.tokens * share)
            yield Booked(row.number, begin, end, row.ranks, part, row.step, row.counts, tokens)


def overlap_share(row: Booked, since: float, until: float) -> float:
    length = row.end - row.begin
    if length <= 0:
        return 1.0 if since <= row.begin < until else 0.0
    return max(0.0, min(row.end, until) - max(row.begin, since)) / length


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def by_window(found: JobAccount, window_s: float) -> list[tuple[float, Seconds]]:
    """(begin, rank-seconds by state) of every window that has rows, counted from the job's begin."""
    bins: dict[int, Seconds] = defaultdict(lambda: defaultdict(float))
    for row in found.rows:
        first, last = int((row.begin - found.begin) // window_s), int((row.end - found.begin) // window_s)
        for number in range(max(0, first), last + 1):
            low = found.begin + number * window_s
            share = overlap_share(row, low, low + window_s) if first != last else 1.0
            for state, lost in row.seconds.items():
                bins[number][kind_of(state)] += lost * share
    return [(found.begin + number * window_s, dict(bins[number])) for number in sorted(bins)]
