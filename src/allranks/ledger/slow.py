"""The cost of slow ranks: replays the steps of a job from the arrival times in its black boxes, with some ranks made as fast as
the others. Pure.

A rank's own time before a collective is the time from the end of the previous collective until its arrival. A step takes as
long as the slowest rank before each collective. A receive ends when the rank has called it and the sender has sent. Replacing
the own times of a rank by typical times of the others gives the step without its delay. Groups (data, tensor, expert) and
pipelines are replayed together, in the order of the recording.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.blackbox.phases import GC, PhaseMark
from allranks.ledger.arrivals import (
    Blocking,
    Collectives,
    Line,
    Messages,
    find_blocking,
    find_collectives,
    find_messages,
    find_non_blocking,
)
from allranks.ledger.changes import ChangePoint, find_change
from allranks.ledger.records import SAVING, kind_of, state_of
from allranks.model.formatting import duration, rank_list, ranks_text
from allranks.model.trace import RankTrace

MIN_STEPS = 8
MIN_RANKS = 2
MEMORY, AGAIN_S = 400, 600.0
JUDGE_NS = 60 * 10**9
OVERLAP = 4  # steps that are read again, since the first steps of a reading are incomplete
MIN_GAIN = 0.02  # of a step; less is noise
MOST = 0.75  # of the largest gain
SMOOTH = 11  # steps
PAUSE = 6.0  # a time longer than this many times the usual spread is a pause
TOGETHER = 2.0  # all ranks pause when the others take this many times their usual time
OFTEN = 0.6  # share of the steps in which the same rank is the last
# Causes
ALWAYS, SINCE = "one rank always", "one rank since a moment"
TURNS, LENGTH = "different ranks in turn", "input length"
COLLECTING, STAGE = "garbage collection", "stage"
PAUSES = "pauses of single ranks"
Phases = Mapping[int, Sequence[PhaseMark]]  # by rank


@dataclass(frozen=True)
class OwnTimes:
    """Seconds of own work of each rank in each step: ranks x steps."""

    ranks: tuple[int, ...]
    steps: np.ndarray  # numbers
    at: np.ndarray  # epoch seconds of the begin
    own: np.ndarray
    step_s: np.ndarray  # duration of each step


@dataclass(frozen=True)
class WhatIf:
    """The duration of a step with some ranks as fast as the others."""

    who: str
    ranks: tuple[int, ...]
    step_s: float
    gain: float  # share of the step


@dataclass(frozen=True)
class SlowReport:
    step_s: float  # mean, as measured
    replayed_s: float  # the same from the replay; the difference is its error
    what_ifs: tuple[WhatIf, ...]  # the largest gain first
    cause: str  # "" when no rank is slow
    evidence: tuple[str, ...]
    ranks: int
    steps: int
    changes: tuple[ChangePoint, ...] = ()

    @property
    def sentence(self) -> str:
        """ "Without rank 5: 1.9 s instead of 2.4 s per step, which saves 21% of the time of 512 ranks (one rank always)"."""
        if not self.what_ifs:
            return f"No rank slows the others down: {duration(self.step_s)} per step, {self.steps:,} steps of {self.ranks} ranks."
        best = self.what_ifs[0]
        gain = f"which saves {best.gain:.0%} of the time of {self.ranks} ranks"
        return f"Without {best.who}: {duration(best.step_s)} instead of {duration(self.step_s)} per step, {gain} ({self.cause})."


@dataclass(frozen=True)
class _Recorded:
    """The calls as the replay needs them. A position is the same call in every step: its rows in `calls`, calls x ranks."""

    calls: Blocking
    cuts: np.ndarray  # where the rows of each call begin, and the end of the last
    message: np.ndarray  # the message that a call sends or receives
    positions: tuple[np.ndarray, ...]


def _prepare(calls: Blocking, messages: Sequence[Messages]) -> _Recorded:
    cuts = np.searchsorted(calls.call, np.arange(len(calls.at) + 1))
    first = np.cumsum([0, *(len(one.sent) for one in messages)])
    message = np.where(calls.kind < 2, first[np.minimum(calls.source, len(messages))] + calls.number, -1)
    seen: Counter[tuple[int, ...]] = Counter()  # calls of a kind so far in the step
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n, (kind, source, step) in enumerate(
        zip(calls.kind.tolist(), calls.source.tolist(), calls.step.tolist(), strict=True)
    ):
        found[kind, source, seen[kind, source, step]].append(n)
        seen[kind, source, step] += 1
    width = np.diff(cuts)
    positions = tuple(cuts[np.array(of)][:, None] + np.arange(width[of[0]]) for of in found.values())
    return _Recorded(calls, cuts, message, positions)


def replay(recorded: _Recorded, own: np.ndarray) -> dict[int, float]:
    """Step -> seconds, with these own times."""
    calls, cuts = recorded.calls, recorded.cuts.tolist()
    free = np.zeros(len(calls.ranks))
    sent: dict[int, float] = {}
    ends: dict[int, float] = {}
    of_calls = zip(recorded.message.tolist(), calls.kind.tolist(), calls.step.tolist(), strict=True)
    for n, (message, kind, step) in enumerate(of_calls):
        rows = slice(cuts[n], cuts[n + 1])
        at = float((free[calls.rank[rows]] + own[rows]).max())
        if kind == 0:
            sent[message] = at
        elif kind == 1:
            at = max(at, sent.get(message, 0.0))
        free[calls.rank[rows]] = at
        ends[step] = float(free.max())
    steps = sorted(ends)
    return {step: ends[step] - ends[before] for before, step in itertools.pairwise(steps)}


def as_fast_as_others(recorded: _Recorded, times: OwnTimes, chosen_ranks: Collection[int]) -> np.ndarray:
    """Own times with the chosen ranks (indices) as fast as the others. They take the time of another rank in the same collective one step
    earlier, so they are as uneven as the others but pause (evaluate, save) with them. In collectives without other ranks their
    time is scaled as in the whole step."""
    chosen = np.zeros(len(times.ranks), bool)
    chosen[list(chosen_ranks)] = True
    per_step = np.median(times.own, axis=1)
    others = float(np.median(per_step[~chosen])) if not chosen.all() else 0.0
    factor = np.where(chosen, np.minimum(1.0, others / np.maximum(per_step, 1e-9)), 1.0)
    found = recorded.calls.own.copy()
    for rows in recorded.positions:
        own, members = recorded.calls.own[rows], recorded.calls.rank[rows[0]]
        slow = chosen[members]
        if slow.all():
            found[rows] = own * factor[members]
        elif slow.any():
            others = np.median(own[:, ~slow], axis=1)
            level = _running_median(others)
            level = np.where(others > TOGETHER * level, others, level)
            before = np.maximum(np.arange(len(own)) - 1, 0)
            who = np.flatnonzero(~slow)[np.arange(len(own)) % (~slow).sum()]
            drawn = own[before, who] * level / np.maximum(level[before], 1e-9)
            found[rows] = np.where(slow, drawn[:, None], own)
    return found


def without_pauses(recorded: _Recorded) -> np.ndarray:
    """Own times without pauses: no rank takes longer than the typical rank in the same collective plus its own usual excess."""
    found = recorded.calls.own.copy()
    for rows in recorded.positions:
        own = found[rows]
        least = own.min(axis=1) if own.shape[1] > 1 else _running_median(own[:, 0])
        excess = own - least[:, None]
        typical = np.median(excess, axis=0)
        spread = np.median(np.abs(excess - typical), axis=0)
        without = least[:, None] + np.minimum(excess, typical + PAUSE * spread)
        middle = np.median(without, axis=1, keepdims=True)
        found[rows] = np.minimum(own, middle + np.median(without - middle, axis=0))
    return found


def _running_median(values: np.ndarray) -> np.ndarray:
    """Median over SMOOTH steps: the time that changes for all ranks alike, as with longer inputs."""
    padded = np.pad(values, SMOOTH // 2, mode="edge")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH), axis=1)
    return found


def own_times(calls: Blocking) -> OwnTimes:
    steps = np.unique(calls.step)[1:]  # the first is incomplete
    at, whole = np.zeros(len(steps)), np.isin(calls.step, steps)
    np.maximum.at(at, np.searchsorted(steps, calls.step[whole]), calls.at[whole])
    own = _by_step(steps, calls, calls.own)
    took = np.diff(at, prepend=at[:1]) if len(at) else at
    return OwnTimes(calls.ranks, steps, at, own, took)


def _by_step(steps: np.ndarray, calls: Blocking, values: np.ndarray) -> np.ndarray:
    """Sums of the values of rows: ranks x steps."""
    found, step = np.zeros((len(calls.ranks), len(steps))), calls.step[calls.call]
    rows = np.isin(step, steps)
    np.add.at(found, (calls.rank[rows], np.searchsorted(steps, step[rows])), values[rows])
    return found


@dataclass(frozen=True)
class _Candidate:
    who: str
    members: list[int]  # indices
    kind: str  # "rank", "node", "group", "stage", "pauses"


def find_slow(traces: Sequence[RankTrace], phases: Phases | None = None) -> SlowReport | None:
    """The cost of slow ranks, nodes, stages and groups, and of pauses; None when the boxes hold too few steps. If a rank became
    slow, the report covers the steps since then."""
    found = _find_slow(traces, phases or {})
    if found is None or not found.changes:
        return found
    since = _find_slow(traces, phases or {}, max(one.at for one in found.changes), found.changes)
    return found if since is None or not since.what_ifs else since


def _find_slow(
    traces: Sequence[RankTrace], phases: Phases, since: float = 0.0, changes: tuple[ChangePoint, ...] = ()
) -> SlowReport | None:
    since_ns = int(since * 1e9)
    collectives, messages = find_collectives(traces, since_ns), find_messages(traces, since_ns)
    calls = find_blocking(collectives, messages)
    ranks, recorded, times = calls.ranks, _prepare(calls, messages), own_times(calls)
    if len(ranks) < 2 or len(times.steps) < MIN_STEPS:
        return None
    base = _typical(replay(recorded, calls.own))
    hosts: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        if trace.header.rank in ranks and trace.header.host:
            hosts[trace.header.host].append(ranks.index(trace.header.rank))
    found = []
    for one in _candidates(times, hosts, collectives, messages):
        pauses = one.kind == "pauses"
        own = without_pauses(recorded) if pauses else as_fast_as_others(recorded, times, one.members)
        step_s = _typical(replay(recorded, own))
        gain = 1 - step_s / max(base, 1e-9)
        found.append((one.kind, WhatIf(one.who, tuple(ranks[i] for i in one.members), step_s, gain)))
    most = MOST * max(one.gain for _, one in found)

    def order(one: tuple[str, WhatIf]) -> tuple[bool, int, float]:
        """Few ranks that explain most of the gain come before many that explain all of it."""
        minor = one[1].gain < most
        return minor, 0 if minor else len(one[1].ranks), -one[1].gain

    gains = sorted((one for one in found if one[1].gain >= MIN_GAIN), key=order)
    what_ifs = [one for _, one in gains]
    cause, evidence = _classify(times, calls, gains[0], phases) if gains else ("", ())
    if cause in (COLLECTING, LENGTH) and gains[0][0] == "pauses":
        what_ifs[0] = replace(what_ifs[0], who=COLLECTING if cause == COLLECTING else "uneven inputs")
    changes = changes or tuple(
        change for i, rank in enumerate(ranks) if (change := rank_change(times, i, rank)) is not None
    )
    if changes and what_ifs and set(what_ifs[0].ranks) & {one.rank for one in changes} and cause == ALWAYS:
        cause = SINCE
    evidence += tuple(one.sentence for one in changes)
    step_s = _typical(dict(enumerate(times.step_s[1:]))) if len(times.step_s) > 1 else base
    return SlowReport(step_s, base, tuple(what_ifs), cause, evidence, len(ranks), len(times.steps), changes)


def _typical(steps: Mapping[int, float]) -> float:
    """Mean without the longest 5 %, which hold evaluation and saves; rare delays still count."""
    values = np.sort(np.array(list(steps.values())))
    kept = values[: max(1, int(np.ceil(len(values) * 0.95)))]
    return float(kept.mean()) if len(kept) else 0.0


def _candidates(
    times: OwnTimes,
    hosts: Mapping[str, list[int]],
    collectives: Sequence[Collectives],
    messages: Sequence[Messages],
) -> list[_Candidate]:
    """What the replay makes faster: the ranks with the most own time, each node, stage and group, and the pauses of all."""
    late = (times.own - np.median(times.own, axis=0)).clip(0).sum(axis=1)
    stages = find_stages(collectives, messages)
    alone = {stage[0] for stage in stages if len(stage) == 1}
    found = [
        _Candidate(f"rank {times.ranks[i]}", [int(i)], "stage" if times.ranks[i] in alone else "rank")
        for i in np.argsort(-late)[:4]
    ]
    if len(hosts) > 1:
        found += [_Candidate(f"node {host}", members, "node") for host, members in sorted(hosts.items())[:64]]
    for stage in stages:
        if len(stage) > 1:
            members = [times.ranks.index(rank) for rank in stage]
            found.append(_Candidate(f"the stage of {ranks_text(stage)}", members, "stage"))
    for group in {one.ranks for one in collectives[:64]} - set(stages):
        if 1 < len(group) < len(times.ranks):
            members = [times.ranks.index(rank) for rank in group]
            found.append(_Candidate(f"group of {ranks_text(group)}", members, "group"))
    return [*found, _Candidate(PAUSES, list(range(len(times.ranks))), "pauses")]


def find_stages(collectives: Sequence[Collectives], messages: Sequence[Messages]) -> list[tuple[int, ...]]:
    """Pipeline stages: groups of ranks that send to other ranks but not to each other."""
    links = {frozenset((one.sender, one.receiver)) for one in messages}
    talking = {rank for link in links for rank in link}
    groups = {
        one.ranks
        for one in collectives
        if talking.issuperset(one.ranks) and not any(link.issubset(one.ranks) for link in links)
    }
    grouped = {rank for group in groups for rank in group}
    return sorted([*groups, *((rank,) for rank in talking - grouped)])


def _classify(
    times: OwnTimes, calls: Blocking, best: tuple[str, WhatIf], phases: Phases
) -> tuple[str, tuple[str, ...]]:
    """The cause of the delay, and its evidence."""
    kind, what_if = best
    excess = (times.own - np.median(times.own, axis=0)).clip(0)
    if len(times.ranks) == MIN_RANKS:  # the median of two ranks lies between them
        excess = times.own - times.own.min(axis=0)
    top, worst = excess.max(axis=0), excess.argmax(axis=0)
    slow = top > MIN_GAIN * max(float(np.median(times.step_s)), 1e-9)
    saving = np.isin(times.steps, list(_saved_steps(times, phases)))
    if saving.any() and float(top[saving].sum()) > 0.6 * float(top.sum()):
        steps = f"{int(saving.sum())} of {len(times.steps)} steps"
        return SAVING, (f"{steps} contain a save, and most of the delay",)
    if (share := _collected_share(times, top, worst, phases)) > 0.5:
        return COLLECTING, (f"garbage collection was running in {share:.0%} of the delay",)
    if (link := _length_link(times, calls)) > 0.7:
        return LENGTH, (f"own time follows the size of the input (correlation {link:.2f})",)
    if not slow.any():
        return TURNS if kind == "pauses" else ALWAYS, ()
    shares = np.bincount(worst[slow], minlength=len(times.ranks)) / slow.sum()
    first = int(shares.argmax())
    steps = f"{shares[first]:.0%} of {int(slow.sum()):,} slow steps"
    slowest = f"rank {times.ranks[first]} was the slowest in {steps}"
    if kind == "stage":
        return STAGE, (f"this stage computes longer than the others: {ranks_text(what_if.ranks)}",)
    if kind in ("node", "group"):
        return kind, (f"ranks {rank_list(what_if.ranks)} are slow together", slowest)
    if kind == "rank" and shares[first] >= OFTEN:
        return ALWAYS, (slowest,)
    spread = f"{int((shares > 0).sum())} ranks were the slowest at some time"
    return TURNS, (spread, slowest, "slow data loading is a common cause")


def _saved_steps(times: OwnTimes, phases: Phases) -> set[int]:
    """Steps in which a rank saved."""
    begins = [
        mark.begin_ns / 1e9
        for marks in phases.values()
        for mark in marks
        if kind_of(state_of(mark.name)) == SAVING
    ]
    after = np.searchsorted(times.at, begins)
    return {int(times.steps[k]) for k in after if k < len(times.steps)}


def _collected_share(times: OwnTimes, top: np.ndarray, worst: np.ndarray, phases: Phases) -> float:
    """Share of the delay of each step's slowest rank that was garbage collection, as far as the marks reach back."""
    marks = {
        rank: [one for one in phases.get(rank, ()) if one.name == GC and one.end_ns] for rank in times.ranks
    }
    begins = [one.begin_ns / 1e9 for found in marks.values() for one in found]
    if not begins:
        return 0.0
    begin, lost, explained = np.concatenate([times.at[:1], times.at[:-1]]), 0.0, 0.0
    for k in np.flatnonzero(times.at >= min(begins)):
        paused = sum(
            max(0.0, min(one.end_ns / 1e9, times.at[k]) - max(one.begin_ns / 1e9, begin[k]))
            for one in marks[times.ranks[worst[k]]]
        )
        lost, explained = lost + float(top[k]), explained + min(paused, float(top[k]))
    return explained / max(lost, 1e-9)


def _length_link(times: OwnTimes, calls: Blocking) -> float:
    """Correlation of own times with input sizes within steps, where sizes differ between ranks."""
    sizes = _by_step(times.steps, calls, calls.elements)
    differ = np.ptp(sizes, axis=0) > 0
    own, size = ((one - one.mean(axis=0))[:, differ].ravel() for one in (times.own, sizes))
    if differ.sum() < MIN_STEPS or own.std() == 0 or size.std() == 0:
        return 0.0
    return float(np.corrcoef(own, size)[0, 1])


def rank_change(times: OwnTimes, index: int, rank: int) -> ChangePoint | None:
    """When a rank became slower than the others, if it did. Of two others the slower counts: by chance two of three ranks
    are later than the fastest."""
    others = np.sort(np.delete(times.own, index, axis=0), axis=0)[(len(times.own) - 1) // 2]
    return find_change(times.own[index] - others, others, times.at, rank)


@dataclass
class Lateness:
    """The own times of the last steps of a running job, to notice when a rank of this node becomes slow."""

    times: OwnTimes | None = None
    non_blocking: frozenset[Line] | None = None  # None: not known yet
    _reported: dict[int, float] = field(default_factory=dict)  # rank -> when it became slow
    _from_ns: int = 0  # time of the first boxes
    _judged_ns: int = 0

    def add(self, traces: Sequence[RankTrace]) -> list[ChangePoint]:
        """Takes newer boxes of the same ranks; returns ranks that became slow, each once."""
        old = self.times
        since_ns = int(old.at[-OVERLAP] * 1e9) if old is not None and len(old.at) > OVERLAP else 0
        if self._find_non_blocking(traces) and old is not None:  # earlier steps were measured in another way
            old, since_ns = None, 0
        collectives = find_collectives(traces, since_ns, non_blocking=self.non_blocking)
        new = own_times(find_blocking(collectives, find_messages(traces, since_ns)))
        ranks = new.ranks
        if len(ranks) < MIN_RANKS:
            return []
        here = new.own[:, -OVERLAP:].max(axis=1, initial=0.0) > 0  # in the newest steps
        ranks = tuple(itertools.compress(ranks, here))
        if len(ranks) < MIN_RANKS:
            return []
        new = replace(new, ranks=ranks, own=new.own[here])
        whole = np.arange(len(new.at)) < len(new.at) - 1  # the last step may be unfinished
        if old is not None and old.ranks == new.ranks and len(old.at):
            fresh = whole & (new.at > old.at[-1])
            both = ((old.steps, new.steps), (old.at, new.at), (old.own, new.own), (old.step_s, new.step_s))
            joined = (np.concatenate([a, b[..., fresh]], axis=-1)[..., -MEMORY:] for a, b in both)
            new = OwnTimes(ranks, *joined)
        else:
            new = OwnTimes(ranks, *(one[..., whole] for one in (new.steps, new.at, new.own, new.step_s)))
        self.times = new
        found = []
        for index, rank in enumerate(ranks):
            change = rank_change(new, index, rank)
            if change is not None and change.at > self._reported.get(rank, 0.0) + AGAIN_S:
                self._reported[rank] = change.at
                found.append(change)
        return found

    def _find_non_blocking(self, traces: Sequence[RankTrace]) -> bool:
        """Updates `non_blocking`, four times in the first minute, then once a minute; True if it changed."""
        now = max((int(trace.calls["created_ns"].max(initial=0)) for trace in traces), default=0)
        self._from_ns = self._from_ns or now
        every = JUDGE_NS if now - self._from_ns >= JUDGE_NS else JUDGE_NS // 4
        if self.non_blocking is not None and now - self._judged_ns < every:
            return False
        before, self._judged_ns = self.non_blocking, now
        self.non_blocking = find_non_blocking(find_collectives(traces, non_blocking=()), traces)
        return before != self.non_blocking
