"""Which rank waited for which, and for how long, from the arrival times in black boxes. Pure.

A rank waits from its own arrival until the last rank arrives. The buckets of a backward pass overlap with computation, so only
the last one counts as a wait. `is_blocking` finds other calls that do not block. On one host arrivals are compared by the clock.
Clocks of hosts differ, so between hosts the time inside the call is compared: the rank that waits least came last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.model.trace import Flag, RankTrace

#: Operations that no rank leaves before every rank has entered.
SYNCHRONISING = (
    "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier",
)  # fmt: skip
_UNUSED = Flag.P2P | Flag.COALESCED_PART | Flag.CAPTURED
MIN_CALLS, NEWEST = 3, 16
# Thresholds of `is_blocking`
MIN_SAMPLES, MIN_OF_POSITION = 48, 12  # collectives in all, and at one position of the step
USUAL = 0.95  # quantile above which a value is an outlier
SURE = 4.0  # standard errors
EXPLAINED, SHORTEST_S = 0.01, 1e-5  # least share of the variance of lateness, and its least deviation
MIN_SHARE = 0.002  # of the time; shorter waits are dropped
SKEW_S = 1.0  # between clocks of hosts
LONGEST_S = 60.0  # how long before a window a wait in it may have begun
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # begins, ends, ranks waited for


@dataclass(frozen=True)
class Collectives:
    """The collectives of one group that all of its ranks here have finished. Matrices are ranks x collectives."""

    group: str
    ranks: tuple[int, ...]
    arrived: np.ndarray  # epoch seconds by each rank's own clock
    late: np.ndarray  # seconds until the last rank came; 0 for the last rank
    step: np.ndarray
    blocks: np.ndarray  # whether the rank waits in this call instead of computing
    elements: np.ndarray  # of the input
    rows: np.ndarray  # of these calls in the box of each rank


def find_collectives(
    traces: Sequence[RankTrace],
    since_ns: int = 0,
    until_ns: int = 1 << 62,
    non_blocking: Collection[Line] | None = None,
    ended_ns: int = 0,
) -> list[Collectives]:
    """One entry per group with at least two of these ranks: collectives that began in this window and did not end before
    `ended_ns`. `non_blocking` is an earlier result of `find_non_blocking`; None computes it from all calls."""
    if non_blocking is None:
        whole = _match_all(traces)
        non_blocking = find_non_blocking(whole, traces)
    else:
        whole = _match_all(traces, since_ns, until_ns, ended_ns)
    marked = [_without(one, traces, non_blocking) for one in whole]
    return [part for one in marked if (part := _between(one, since_ns / 1e9, until_ns / 1e9)).arrived.size]


def _match_all(
    traces: Sequence[RankTrace], since_ns: int = 0, until_ns: int = 1 << 62, ended_ns: int = 0
) -> list[Collectives]:
    lanes = find_lanes(traces, since_ns, until_ns, ended_ns, least=NEWEST)
    found = [_match(name, lane) for (name, _), lane in lanes.items() if len(lane) > 1]
    return [one for one in found if one is not None]


#: Where a program makes a call: its stack, or a number where the box has no stack.
Line = object
Lane = dict[int, tuple[RankTrace, np.ndarray]]  # rank -> its box, and rows of its calls


def find_lanes(
    traces: Sequence[RankTrace],
    since_ns: int = 0,
    until_ns: int = 1 << 62,
    ended_ns: int = 0,
    least: int = 0,
) -> dict[tuple[str, tuple[int, ...]], Lane]:
    """Group -> the synchronising calls of each rank that began in this window and did not end before `ended_ns`; with fewer
    than `least` of them, the newest `least` calls before `until_ns`."""
    lanes: dict[tuple[str, tuple[int, ...]], Lane] = defaultdict(dict)
    for trace in traces:
        rank, calls = trace.header.rank, trace.calls
        if rank is None or not len(calls):
            continue
        synchronising = np.array([name.lstrip("_").startswith(SYNCHRONISING) for name in trace.names])
        keep = synchronising[calls["op"]] & (calls["flags"] & _UNUSED == 0) & (calls["seq"] > 0)
        keep &= calls["created_ns"] < until_ns
        within = calls["created_ns"] >= since_ns
        within &= (calls["completed_ns"] == 0) | (calls["completed_ns"] >= ended_ns)
        for number in np.unique(calls["group"][keep]):
            group, rows = trace.groups[number], np.flatnonzero(keep & (calls["group"] == number))
            chosen = rows[within[rows]]
            chosen = rows[-least:] if len(chosen) < least else chosen
            if len(chosen):
                lanes[group.name, group.ranks][rank] = trace, chosen
    return lanes


def _match(name: str, lane: Lane) -> Collectives | None:
    ranks = tuple(sorted(lane))
    seqs: np.ndarray | None = None
    for trace, rows in lane.values():
        own = np.unique(trace.calls["seq"][rows])
        seqs = own if seqs is None else np.intersect1d(seqs, own, assume_unique=True)
    if seqs is None or len(seqs) < MIN_CALLS:
        return None
    shape = len(ranks), len(seqs)
    places = np.zeros(shape, int)
    arrived, ended, blocks, elements = np.zeros(shape), np.zeros(shape), np.ones(shape, bool), np.zeros(shape)
    step = np.full(len(seqs), -1)
    for i, rank in enumerate(ranks):
        trace, rows = lane[rank]
        calls, rows = trace.calls, rows[np.searchsorted(trace.calls["seq"][rows], seqs)]
        arrived[i], ended[i] = calls["created_ns"][rows] / 1e9, calls["completed_ns"][rows] / 1e9
        blocks[i], elements[i], places[i] = ~overlaps(trace)[rows], calls["in_numel"][rows], rows
        step = np.maximum(step, calls["step"][rows])
    hosts = {lane[rank][0].header.host for rank in ranks}
    done = (ended > 0).all(axis=0)
    took = np.where(ended > 0, ended - arrived, 0.0)
    late = arrived.max(axis=0) - arrived if len(hosts) == 1 else took - took.min(axis=0)
    if len(hosts) > 1:  # by the clock of the first rank
        parts = (arrived[0] + late[0] - late, late, blocks, elements, step, places)
        arrived, late, blocks, elements, step, places = (part[..., done] for part in parts)
    return Collectives(name, ranks, arrived, late, step, blocks, elements, places)


def _between(one: Collectives, since: float, until: float) -> Collectives:
    """The collectives that all ranks began between these times."""
    at = (one.arrived >= since).all(axis=0) & (one.arrived < until).all(axis=0)
    names = ("arrived", "late", "step", "blocks", "elements", "rows")
    return replace(one, **{name: getattr(one, name)[..., at] for name in names})


def find_non_blocking(collectives: Sequence[Collectives], traces: Sequence[RankTrace]) -> frozenset[Line]:
    """The lines whose calls do not block. Groups that make the same call are judged together."""
    calls = {trace.header.rank: trace.calls for trace in traces}
    late = {rank: np.zeros(len(rows) + 1) for rank, rows in calls.items()}
    for one in collectives:
        for i, rank in enumerate(one.ranks):
            late[rank][one.rows[i]] = one.late[i]
    features = {rank: _features(rows, late[rank]) for rank, rows in calls.items()}
    parts: dict[Line, dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for one in collectives:
        numbers, lines = _lines(one, traces)
        for line in np.unique(numbers).tolist():
            of_line = np.flatnonzero(numbers == line)
            positions = _positions(one.step[of_line])
            if (one.step[of_line] < 0).all():
                positions = _places_in_pass(one.elements[0, of_line], one.arrived[0, of_line]).clip(0)
            for position in np.flatnonzero(np.bincount(positions) >= MIN_OF_POSITION).tolist():
                if not one.blocks[:, of_line[positions == position]].any():
                    continue  # these overlap with the backward pass anyway
                rows = one.rows[:, of_line[positions == position]]
                found = [_centered(features[rank][:, rows[i]]) for i, rank in enumerate(one.ranks)]
                parts[lines[line]][position] += found
    return frozenset(
        line
        for line, found in parts.items()
        if not is_blocking([np.concatenate(one, axis=1) for one in found.values()])
    )


def _lines(one: Collectives, traces: Sequence[RankTrace]) -> tuple[np.ndarray, Sequence[Line]]:
    """The line of each collective as an index into the lines of the first rank's box, and these lines."""
    first = next(trace for trace in traces if trace.header.rank == one.ranks[0])
    return first.calls["stack"][one.rows[0]], [stack or n for n, stack in enumerate(first.stacks)]


def _without(one: Collectives, traces: Sequence[RankTrace], non_blocking: Collection[Line]) -> Collectives:
    """The same collectives, with calls from these lines marked as non-blocking."""
    if not non_blocking:
        return one
    numbers, lines = _lines(one, traces)
    return replace(
        one,
        blocks=one.blocks & ~np.isin(numbers, [n for n, line in enumerate(lines) if line in non_blocking]),
    )


def _positions(steps: np.ndarray) -> np.ndarray:
    """For the calls of one line, in order: the number of earlier calls in the same step; 0 without step marks."""
    begins = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
    positions = np.arange(len(steps)) - np.repeat(begins, np.diff(begins, append=len(steps)))
    found: np.ndarray = np.where(steps < 0, 0, positions)
    return found


def _features(calls: np.ndarray, late: np.ndarray) -> np.ndarray:
    """For each call of one rank: lateness of the others, time from then until the rank's next call, time since its previous
    call, lateness of the others at the previous call. NaN at the ends."""
    passed = np.diff((calls["created_ns"] - calls["created_ns"][:1]) / 1e9, prepend=np.nan, append=np.nan)
    return np.stack([late[:-1], passed[1:] - late[:-1], passed[:-1], np.roll(late[:-1], 1)])


def _centered(features: np.ndarray) -> np.ndarray:
    """Features of the calls in which other ranks came later, less their medians."""
    features = features[:, (features[0] > 0) & ~np.isnan(features).any(axis=0)]
    found: np.ndarray = features - np.median(features, axis=1, keepdims=True) if features.size else features
    return found


def is_blocking(positions: Sequence[np.ndarray]) -> bool:
    """Whether ranks wait in a call for late ranks. A rank that waits takes its usual time after the last rank has come; a rank
    that computes meanwhile has that much less left to do. A rank's speed in the step also shows before the call and is regressed
    out. Each position of the step is compared with itself only, since different work follows each layer."""
    usual = [_without_outliers(one) for one in positions if one.shape[1] >= MIN_OF_POSITION]
    samples = sum(one.shape[1] for one in usual)
    if samples < MIN_SAMPLES:
        return True
    rest = np.concatenate([_residuals(one[:2], one[2:]) for one in usual], axis=1)
    own = float(rest[0] @ rest[0])
    if own <= max(EXPLAINED * sum(float(one[0] @ one[0]) for one in usual), samples * SHORTEST_S**2):
        return True  # lateness varies too little to decide
    slope = float(rest[0] @ rest[1]) / own
    left = rest[1] - slope * rest[0]
    error = np.sqrt(float(left @ left) / max(samples - 4, 1) / own)
    return bool(slope > -0.5 or slope + SURE * error > 0)


def _without_outliers(features: np.ndarray) -> np.ndarray:
    """Drops pauses, and calls in which a rank came so late that the others had nothing left to do."""
    late, after = features[:2]
    return features[:, (after <= np.quantile(after, USUAL)) & (late <= np.quantile(late, USUAL))]


def _residuals(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    by = np.stack([*known, np.ones(known.shape[1])], axis=1)
    found: np.ndarray = values - (by @ np.linalg.lstsq(by, values.T, rcond=None)[0]).T
    return found


def overlaps(trace: RankTrace) -> np.ndarray:
    """Calls that overlap with a backward pass: another call from the same line follows in the same step."""
    calls = trace.calls
    backward = np.array([any("backward" in frame.name for frame in stack) for stack in trace.stacks])
    follows = np.zeros(len(calls), bool)
    same = (calls["stack"][:-1] == calls["stack"][1:]) & (calls["step"][:-1] == calls["step"][1:])
    follows[:-1] = same & (np.diff(calls["created_ns"]) < 60e9)
    found: np.ndarray = follows & backward[calls["stack"]] & (calls["stack"] > 0)
    unmarked = found & (calls["step"] < 0)
    for line in np.unique(calls["stack"][unmarked]):
        rows = np.flatnonzero(calls["stack"] == line)
        places = _places_in_pass(calls["in_numel"][rows], calls["created_ns"][rows])
        found[rows[(places == places.max()) & (places >= 0)]] = False
    return found


def _places_in_pass(sizes: np.ndarray, begun: np.ndarray) -> np.ndarray:
    """Of calls of one line without step marks: how many it made in the same pass before, by sizes that repeat; -1: not known. The
    longest time follows the last one. The first passes may differ: DDP forms its buckets anew."""
    sizes, back = sizes[len(sizes) // 4 :], np.arange(len(sizes))[::-1]
    period = next((n for n in range(1, len(sizes) // 2 + 1) if (sizes[n:] == sizes[:-n]).all()), 0)
    if not period:
        return np.full(len(back), -1)
    after = np.diff(begun, append=begun[-1:])
    last = int(np.argmax([np.median(after[back % period == n]) for n in range(period)]))
    found: np.ndarray = (last - 1 - back) % period
    return found


@dataclass(frozen=True)
class Messages:
    """Messages from one rank to another in one group that both boxes hold: arrays of equal length, in order."""

    sender: int
    receiver: int
    sent: np.ndarray  # epoch seconds
    asked: np.ndarray  # when the receiver began to wait for it
    step: np.ndarray


def find_messages(traces: Sequence[RankTrace], since_ns: int = 0) -> list[Messages]:
    """Sends and receives of pipelines, matched by their order within a step. Only within a host, since clocks differ."""
    sides: dict[tuple[str, int, int], dict[str, np.ndarray]] = defaultdict(dict)
    hosts = {trace.header.rank: trace.header.host for trace in traces}
    for trace in traces:
        rank, calls = trace.header.rank, trace.calls
        if rank is None or not len(calls):
            continue
        calls = calls[
            (calls["flags"] & Flag.P2P != 0) & (calls["peer"] >= 0) & (calls["created_ns"] >= since_ns)
        ]
        if not len(calls):
            continue
        kinds = np.array([name.lstrip("_").lstrip("i")[:4] for name in trace.names] or [""])[calls["op"]]
        for kind in ("send", "recv"):
            for number, peer in {(int(n), int(p)) for n, p in calls[kinds == kind][["group", "peer"]]}:
                rows = calls[(kinds == kind) & (calls["group"] == number) & (calls["peer"] == peer)]
                way = (rank, peer) if kind == "send" else (peer, rank)
                if hosts.get(peer) == trace.header.host:
                    sides[(trace.groups[number].name, *way)][kind] = rows
    both = ((sender, receiver, side) for (_, sender, receiver), side in sides.items() if len(side) == 2)
    found = [_pair(sender, receiver, side["send"], side["recv"]) for sender, receiver, side in both]
    return [one for one in found if len(one.sent)]


def _pair(sender: int, receiver: int, sends: np.ndarray, recvs: np.ndarray) -> Messages:
    """Pairs the messages of steps in which both ranks have the same number; a ring may begin in the middle of a step."""
    numbers = [np.unique(side["step"], return_counts=True) for side in (sends, recvs)]
    same, first, second = np.intersect1d(
        numbers[0][0], numbers[1][0], assume_unique=True, return_indices=True
    )
    same = same[numbers[0][1][first] == numbers[1][1][second]]
    sends, recvs = (side[np.isin(side["step"], same)] for side in (sends, recvs))
    return Messages(sender, receiver, sends["created_ns"] / 1e9, recvs["created_ns"] / 1e9, sends["step"])


@dataclass(frozen=True)
class Blocking:
    """The blocking calls of all groups, in the order of their release."""

    ranks: tuple[int, ...]
    # one entry per call
    kind: np.ndarray  # 0 send, 1 receive, 2 collective
    source: np.ndarray  # index into the messages or the collectives
    number: np.ndarray  # index in that source
    step: np.ndarray
    at: np.ndarray
    # one entry per rank of each call
    call: np.ndarray
    rank: np.ndarray  # index into `ranks`
    own: np.ndarray  # seconds of own work before the call
    elements: np.ndarray


def find_blocking(collectives: Sequence[Collectives], messages: Sequence[Messages] = ()) -> Blocking:
    """The blocking calls, with own times counted from the release of the rank's previous call."""
    pairs = {rank for one in messages for rank in (one.sender, one.receiver)}
    ranks = tuple(sorted({rank for one in collectives for rank in one.ranks} | pairs))
    index = {rank: i for i, rank in enumerate(ranks)}
    calls, rows, count = [np.zeros((5, 0))], [np.zeros((4, 0))], 0
    for kind, source, members, released, arrived, elements, step, number in _sides(collectives, messages):
        calls.append(np.stack(np.broadcast_arrays(released, kind, source, number, step)))
        numbers, who = count + np.arange(len(released)), [index[rank] for rank in members]
        of_rows = (
            np.tile(numbers, len(who)),
            np.repeat(who, len(numbers)),
            arrived.ravel(),
            elements.ravel(),
        )
        rows.append(np.stack(of_rows))
        count += len(released)
    released, kinds, sources, number, step = table = np.concatenate(calls, axis=1)
    order = np.lexsort((number, sources, kinds, released))
    turn = np.argsort(order)
    call, who, arrived, elements = np.concatenate(rows, axis=1)
    call, who = turn[call.astype(int)], who.astype(int)
    released, kinds, sources, number, step = table[:, order]
    sorting = np.lexsort((call, who))
    before = np.full(len(call), np.nan)
    again = who[sorting][1:] == who[sorting][:-1]
    before[sorting[1:][again]] = released[call[sorting[:-1][again]]]
    own = arrived - before
    # drops a rank's first call, and calls that overlap with those of another group
    kept = np.setdiff1d(np.arange(count), call[~(own >= 0)])
    left = np.flatnonzero(np.isin(call, kept))
    left = left[np.lexsort((who[left], call[left]))]
    kinds, sources, number = (one[kept].astype(int) for one in (kinds, sources, number))
    step = np.where(step >= 0, step, np.arange(count))[kept].astype(int)
    places = np.searchsorted(kept, call[left])
    return Blocking(
        ranks, kinds, sources, number, step, released[kept], places, who[left], own[left], elements[left]
    )


_Side = tuple[int, int, Sequence[int], np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _sides(collectives: Sequence[Collectives], messages: Sequence[Messages]) -> Iterator[_Side]:
    """(kind, source, ranks, release times, arrival times, input sizes, steps, numbers)"""
    for source, one in enumerate(collectives):
        at = np.flatnonzero(one.blocks.any(axis=0))
        arrived = one.arrived[:, at]
        yield 2, source, one.ranks, arrived.max(axis=0), arrived, one.elements[:, at], one.step[at], at
    for source, way in enumerate(messages):
        zeros, numbers = np.zeros(len(way.sent)), np.arange(len(way.sent))
        yield 0, source, (way.sender,), way.sent, way.sent, zeros, way.step, numbers
        released = np.maximum(way.sent, way.asked)
        yield 1, source, (way.receiver,), released, way.asked, zeros, way.step, numbers


def waits_by_rank(collectives: Sequence[Collectives]) -> dict[int, Spans]:
    """For each rank, when it waited and for which rank, in order and without overlaps."""
    found: dict[int, list[np.ndarray]] = defaultdict(list)
    for one in collectives:
        whom, waits = np.array(one.ranks)[np.argmin(one.late, axis=0)], np.where(one.blocks, one.late, 0.0)
        for i, rank in enumerate(one.ranks):
            at = waits[i] > 0
            found[rank].append(np.stack([one.arrived[i, at], one.arrived[i, at] + waits[i, at], whom[at]]))
    return {rank: _disjoint(*np.concatenate(parts, axis=1)) for rank, parts in found.items()}


def _disjoint(begin: np.ndarray, end: np.ndarray, whom: np.ndarray) -> Spans:
    order = np.lexsort((whom, end, begin))
    begin, end, whom = begin[order], end[order], whom[order]
    begin = np.maximum(begin, np.concatenate([[0.0], np.maximum.accumulate(end)])[:-1])
    left = end > begin
    return begin[left], end[left], whom[left].astype(int)


@dataclass(frozen=True)
class Waited:
    """Which rank waited for which, as far as the boxes reach."""

    spans: Mapping[int, Spans] = field(default_factory=dict)  # by rank
    covered_s: float = 0.0  # time that the boxes cover
    whole: bool = True  # the boxes cover the whole window

    def during(self, rank: int, begin: float, end: float, calling_s: float) -> dict[int, float]:
        """Rank -> seconds that `rank` waited for it in this window, `calling_s` of which it spent on steps. Time that the boxes
        no longer cover is extrapolated."""
        if rank not in self.spans:
            return {}
        low, high, whom = self.spans[rank]
        ranks, which = np.unique(whom, return_inverse=True)
        sums = np.bincount(which, np.maximum(0.0, np.minimum(high, end) - np.maximum(low, begin)), len(ranks))
        found = dict(zip(ranks.tolist(), sums.tolist(), strict=True))
        scale = 1.0 if self.whole else calling_s / max(self.covered_s, sum(found.values()), 1e-9)
        return {w: s * scale for w, s in found.items() if s * scale >= MIN_SHARE * calling_s}


def find_waits(
    batches: Sequence[Sequence[RankTrace]],
    begin: float,
    end: float,
    without: Sequence[tuple[float, float]] = (),
    non_blocking: Collection[Line] | None = None,
) -> Waited:
    """All waits between `begin` and `end`; `non_blocking` as for `find_collectives`.

    A batch has one box per rank: one batch of the newest boxes, one of the boxes that ended with those of the ranks that they
    trained with. Waits that overlap with `without` are left out, since that time is booked to an incident.
    """
    since, until, ended = int((begin - LONGEST_S) * 1e9), int(end * 1e9), int((begin - SKEW_S) * 1e9)
    collectives = [
        one for traces in batches for one in find_collectives(traces, since, until, non_blocking, ended)
    ]
    if not collectives:
        return Waited()
    first = max(begin, min(float(one.arrived.min()) for one in collectives))
    last = max(float(one.arrived.max()) for one in collectives)
    covered = last - first - sum(max(0.0, min(last, high) - max(first, low)) for low, high in without)
    spans = {}
    for rank, (low, high, whom) in waits_by_rank(collectives).items():
        left = ~np.any(
            [(low < until_s) & (high > since_s) for since_s, until_s in without] or [low < low], axis=0
        )
        spans[rank] = low[left], high[left], whom[left]
    whole = all(_reaches(trace, int(begin * 1e9)) for traces in batches for trace in traces)
    return Waited(spans, covered, whole)


def _reaches(trace: RankTrace, since_ns: int) -> bool:
    """Whether the box has every call since then."""
    calls = trace.calls
    return not trace.header.dropped or (len(calls) > 0 and int(calls["created_ns"].min()) <= since_ns)
