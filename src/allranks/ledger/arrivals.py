"""When ranks came to their collectives, from black boxes: who waited for whom, and for how long. Pure.

A call counts as waiting from the rank's own arrival until the last rank came. Of the buckets of one backward pass, which overlap
with computing, only the last one waits. Other calls that ranks do not wait in are recognised by what they do next (`waits_in`). On one host arrivals are compared by the clock; between hosts by how
long each rank was inside the call, since their clocks differ: the rank that waits least came last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.model.trace import Flag, RankTrace

#: Operations that nobody leaves before everybody has entered.
SYNCHRONISING = (
    "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier",
)  # fmt: skip
_UNUSED = Flag.P2P | Flag.COALESCED_PART | Flag.CAPTURED
MIN_CALLS, NEWEST = 3, 16
#: For telling whether ranks wait in a call: samples, those of a place in the step, the share without a pause, standard errors, and what lateness must tell.
MIN_SAMPLES, MIN_OF_PLACE, USUAL, SURE, TOLD, SHORTEST_S = 48, 12, 0.95, 4.0, 0.01, 1e-5
MIN_SHARE = 0.002  # of the time: shorter waits are not told
SKEW_S = 1.0  # between clocks of hosts
LONGEST_S = 60.0  # a wait that began longer before a stretch of time is not looked for
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # begins, ends, ranks that were waited for


@dataclass(frozen=True)
class Meetings:
    """The collectives of one group that all of its ranks here have finished; matrices are ranks x collectives."""

    group: str
    ranks: tuple[int, ...]
    arrived: np.ndarray  # epoch seconds by each rank's own clock
    late: np.ndarray  # seconds before the last rank came that this rank came: 0 for the last
    step: np.ndarray
    blocks: np.ndarray  # whether the rank waits in this call (and does not compute meanwhile)
    elements: np.ndarray  # of the input, ranks x collectives
    rows: np.ndarray  # of these calls in the box of each rank

    @property
    def waits_s(self) -> np.ndarray:
        """Late, where it blocks."""
        return np.where(self.blocks, self.late, 0.0)

    @property
    def last(self) -> np.ndarray:
        """Which rank came last, as an index."""
        found: np.ndarray = np.argmin(self.late, axis=0)
        return found


def find_meetings(
    traces: Sequence[RankTrace],
    since_ns: int = 0,
    until_ns: int = 1 << 62,
    unwaited: Collection[Line] | None = None,
    ended_ns: int = 0,
) -> list[Meetings]:
    """One for each group with at least two of these ranks in it: of the collectives that began in this time and did not end before
    `ended_ns`. `unwaited`: as `find_unwaited` found it before, which needs all calls; None: it is found anew."""
    if unwaited is None:
        whole = _match_all(traces)
        unwaited = find_unwaited(whole, traces)
    else:
        whole = _match_all(traces, since_ns, until_ns, ended_ns)
    marked = [_without(one, traces, unwaited) for one in whole]
    return [part for one in marked if (part := _between(one, since_ns / 1e9, until_ns / 1e9)).arrived.size]


def _match_all(
    traces: Sequence[RankTrace], since_ns: int = 0, until_ns: int = 1 << 62, ended_ns: int = 0
) -> list[Meetings]:
    lanes = find_lanes(traces, since_ns, until_ns, ended_ns, least=NEWEST)
    found = [_match(name, lane) for (name, _), lane in lanes.items() if len(lane) > 1]
    return [one for one in found if one is not None]


#: Where a program makes a call: the stack, or its number where boxes have none.
Line = object
Lane = dict[int, tuple[RankTrace, np.ndarray]]  # rank -> its box, and rows of its calls


def find_lanes(
    traces: Sequence[RankTrace],
    since_ns: int = 0,
    until_ns: int = 1 << 62,
    ended_ns: int = 0,
    least: int = 0,
) -> dict[tuple[str, tuple[int, ...]], Lane]:
    """Group -> the calls of each rank that nobody leaves before everybody has entered: those that began in this time and did
    not end before `ended_ns`, or, where they are fewer than `least`, the newest ones before `until_ns`."""
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


def _match(name: str, lane: Lane) -> Meetings | None:
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
    return Meetings(name, ranks, arrived, late, step, blocks, elements, places)


def _between(one: Meetings, since: float, until: float) -> Meetings:
    """The collectives that all ranks began between these times."""
    at = (one.arrived >= since).all(axis=0) & (one.arrived < until).all(axis=0)
    names = ("arrived", "late", "step", "blocks", "elements", "rows")
    return replace(one, **{name: getattr(one, name)[..., at] for name in names})


def find_unwaited(meetings: Sequence[Meetings], traces: Sequence[RankTrace]) -> frozenset[Line]:
    """The lines with calls that ranks do not wait in. Groups that make the same call are judged together."""
    calls = {trace.header.rank: trace.calls for trace in traces}
    late = {rank: np.zeros(len(rows) + 1) for rank, rows in calls.items()}
    for one in meetings:
        for i, rank in enumerate(one.ranks):
            late[rank][one.rows[i]] = one.late[i]
    around = {rank: _around(rows, late[rank]) for rank, rows in calls.items()}
    parts: dict[Line, dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for one in meetings:
        numbers, lines = _lines(one, traces)
        for line in np.unique(numbers).tolist():
            of_line = np.flatnonzero(numbers == line)
            places = _places(one.step[of_line])
            if (one.step[of_line] < 0).all():
                places = _places_in_pass(one.elements[0, of_line], one.arrived[0, of_line]).clip(0)
            for place in np.flatnonzero(np.bincount(places) >= MIN_OF_PLACE).tolist():
                if not one.blocks[:, of_line[places == place]].any():
                    continue  # these overlap with the backward pass anyway
                rows = one.rows[:, of_line[places == place]]
                found = [_less_usual(around[rank][:, rows[i]]) for i, rank in enumerate(one.ranks)]
                parts[lines[line]][place] += found
    return frozenset(
        line
        for line, found in parts.items()
        if not waits_in([np.concatenate(one, axis=1) for one in found.values()])
    )


def _lines(one: Meetings, traces: Sequence[RankTrace]) -> tuple[np.ndarray, Sequence[Line]]:
    """Of each collective the number of its line in the first rank's box, and all lines of that box."""
    first = next(trace for trace in traces if trace.header.rank == one.ranks[0])
    return first.calls["stack"][one.rows[0]], [stack or n for n, stack in enumerate(first.stacks)]


def _without(one: Meetings, traces: Sequence[RankTrace], unwaited: Collection[Line]) -> Meetings:
    """The same where nobody waits in the calls from these lines."""
    if not unwaited:
        return one
    numbers, lines = _lines(one, traces)
    return replace(
        one, blocks=one.blocks & ~np.isin(numbers, [n for n, line in enumerate(lines) if line in unwaited])
    )


def _places(steps: np.ndarray) -> np.ndarray:
    """Of calls of one line, in order: how many it made in the same step before. 0 where steps have no marks."""
    begins = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
    places = np.arange(len(steps)) - np.repeat(begins, np.diff(begins, append=len(steps)))
    found: np.ndarray = np.where(steps < 0, 0, places)
    return found


def _around(calls: np.ndarray, late: np.ndarray) -> np.ndarray:
    """For each call of one rank: how late others came, the time from then until its next call, the time since its call before,
    and how late others were there. Not a number where nobody else makes a call."""
    passed = np.diff((calls["created_ns"] - calls["created_ns"][:1]) / 1e9, prepend=np.nan, append=np.nan)
    return np.stack([late[:-1], passed[1:] - late[:-1], passed[:-1], np.roll(late[:-1], 1)])


def _less_usual(around: np.ndarray) -> np.ndarray:
    """Of calls in which others came later, less what is usual."""
    around = around[:, (around[0] > 0) & ~np.isnan(around).any(axis=0)]
    found: np.ndarray = around - np.median(around, axis=1, keepdims=True) if around.size else around
    return found


def waits_in(places: Sequence[np.ndarray]) -> bool:
    """Whether ranks wait in a call for those that come late. One that waits takes its usual time from then on; one that does
    not has that much less left to do. How fast a rank is in a step shows before the call too, so that is taken out. Places of a
    step are compared each with itself: another layer is followed by other work."""
    usual = [_usual(one) for one in places if one.shape[1] >= MIN_OF_PLACE]  # fewer are explained by anything
    samples = sum(one.shape[1] for one in usual)
    if samples < MIN_SAMPLES:
        return True
    # what the time and the lateness before do not explain
    rest = np.concatenate([_unexplained(one[:2], one[2:]) for one in usual], axis=1)
    own = float(rest[0] @ rest[0])
    if own <= max(TOLD * sum(float(one[0] @ one[0]) for one in usual), samples * SHORTEST_S**2):
        return True  # it says nothing
    slope = float(rest[0] @ rest[1]) / own
    left = rest[1] - slope * rest[0]
    error = np.sqrt(float(left @ left) / max(samples - 4, 1) / own)
    return bool(slope > -0.5 or slope + SURE * error > 0)


def _usual(around: np.ndarray) -> np.ndarray:
    """Without pauses, and without others that came so late that nothing was left to do: these say nothing."""
    late, after = around[:2]
    return around[:, (after <= np.quantile(after, USUAL)) & (late <= np.quantile(late, USUAL))]


def _unexplained(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    by = np.stack([*known, np.ones(known.shape[1])], axis=1)
    found: np.ndarray = values - (by @ np.linalg.lstsq(by, values.T, rcond=None)[0]).T
    return found


def overlaps(trace: RankTrace) -> np.ndarray:
    """Calls that a backward pass makes beside its computing: another one from the same line follows in the same step."""
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
    """What one rank sent to another in one group, as far as both boxes have it: arrays of equal length, in order."""

    sender: int
    receiver: int
    sent: np.ndarray  # epoch seconds
    asked: np.ndarray  # when the receiver began to wait for it
    step: np.ndarray


def find_messages(traces: Sequence[RankTrace], since_ns: int = 0) -> list[Messages]:
    """Sends and receives of pipelines, matched by their order within a step. Between hosts clocks differ: none."""
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
    """Of steps in which both have as many: the ring of one may begin in the middle of a step."""
    numbers = [np.unique(side["step"], return_counts=True) for side in (sends, recvs)]
    same, first, second = np.intersect1d(
        numbers[0][0], numbers[1][0], assume_unique=True, return_indices=True
    )
    same = same[numbers[0][1][first] == numbers[1][1][second]]
    sends, recvs = (side[np.isin(side["step"], same)] for side in (sends, recvs))
    return Messages(sender, receiver, sends["created_ns"] / 1e9, recvs["created_ns"] / 1e9, sends["step"])


@dataclass(frozen=True)
class Blocking:
    """The calls of all groups that ranks wait in, in the order in which they were released."""

    ranks: tuple[int, ...]
    # of each call
    kind: np.ndarray  # 0 send, 1 receive, 2 collective
    source: np.ndarray  # of which messages or meetings
    number: np.ndarray  # its place there
    step: np.ndarray
    at: np.ndarray
    # of each rank in each call
    call: np.ndarray
    rank: np.ndarray  # index
    own: np.ndarray  # seconds before it
    elements: np.ndarray


def find_blocking(meetings: Sequence[Meetings], messages: Sequence[Messages] = ()) -> Blocking:
    """With own times: from the moment at which a rank was released from its call before."""
    pairs = {rank for one in messages for rank in (one.sender, one.receiver)}
    ranks = tuple(sorted({rank for one in meetings for rank in one.ranks} | pairs))
    index = {rank: i for i, rank in enumerate(ranks)}
    calls, rows, count = [np.zeros((5, 0))], [np.zeros((4, 0))], 0
    for kind, source, members, released, arrived, elements, step, number in _sides(meetings, messages):
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
    # without a rank's first call here, and calls that another group overlaps
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


def _sides(meetings: Sequence[Meetings], messages: Sequence[Messages]) -> Iterator[_Side]:
    """Kind, source, ranks, when the calls were released, when each rank came, sizes of inputs, steps, numbers."""
    for source, one in enumerate(meetings):
        at = np.flatnonzero(one.blocks.any(axis=0))
        arrived = one.arrived[:, at]
        yield 2, source, one.ranks, arrived.max(axis=0), arrived, one.elements[:, at], one.step[at], at
    for source, way in enumerate(messages):
        zeros, numbers = np.zeros(len(way.sent)), np.arange(len(way.sent))
        yield 0, source, (way.sender,), way.sent, way.sent, zeros, way.step, numbers
        released = np.maximum(way.sent, way.asked)
        yield 1, source, (way.receiver,), released, way.asked, zeros, way.step, numbers


def waits_by_rank(meetings: Sequence[Meetings]) -> dict[int, Spans]:
    """For each rank the times in which it waited and for whom, in order and without overlaps."""
    found: dict[int, list[np.ndarray]] = defaultdict(list)
    for one in meetings:
        whom, waits = np.array(one.ranks)[one.last], one.waits_s
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
    """Who waited for whom, as far as the boxes show it."""

    spans: Mapping[int, Spans] = field(default_factory=dict)  # by rank
    covered_s: float = 0.0  # what the boxes show
    whole: bool = True  # they show all of it

    def during(self, rank: int, begin: float, end: float, calling_s: float) -> dict[int, float]:
        """Rank -> seconds that this one waited for it between two times, in which it made calls for so long. What the boxes do
        not show any more was like the rest."""
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
    unwaited: Collection[Line] | None = None,
) -> Waited:
    """All waits between `begin` and `end`; `unwaited` as for `find_meetings`.

    A batch has one box of each rank: the newest, and those that ended meanwhile together with the ones that they trained
    with. Waits that touch the times of `without` are left out: they are booked to something else.
    """
    since, until, ended = int((begin - LONGEST_S) * 1e9), int(end * 1e9), int((begin - SKEW_S) * 1e9)
    meetings = [one for traces in batches for one in find_meetings(traces, since, until, unwaited, ended)]
    if not meetings:
        return Waited()
    first = max(begin, min(float(one.arrived.min()) for one in meetings))
    last = max(float(one.arrived.max()) for one in meetings)
    covered = last - first - sum(max(0.0, min(last, high) - max(first, low)) for low, high in without)
    spans = {}
    for rank, (low, high, whom) in waits_by_rank(meetings).items():
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
