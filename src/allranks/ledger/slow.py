"""What slow ranks cost: the steps of a job replayed from the arrival times in its black boxes, with ranks made as fast as the
others. Pure.

A rank's own time before a collective is the time from the end of the collective before it until its arrival. A step takes
as long as the slowest rank before each collective. Replacing the own times of one rank by the typical ones of the others
gives the step without its delay. Groups (data, tensor, expert) are replayed together, in the order of the recording.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from allranks.ledger.arrivals import Meetings, find_meetings
from allranks.ledger.changes import ChangePoint, find_change
from allranks.model.formatting import duration, rank_list, ranks_text
from allranks.model.trace import RankTrace

MIN_STEPS = 8
MIN_RANKS = 2
MEMORY, AGAIN_S = 400, 600.0
MIN_GAIN = 0.02  # of a step: less is noise
OFTEN = 0.6  # of the steps: the same rank is the last


@dataclass(frozen=True)
class OwnTimes:
    """What each rank did itself in each step, in seconds: ranks x steps."""

    ranks: tuple[int, ...]
    steps: np.ndarray  # numbers
    at: np.ndarray  # epoch seconds of the beginning
    own: np.ndarray
    step_s: np.ndarray  # how long each step took


@dataclass(frozen=True)
class WhatIf:
    """The step with some ranks as fast as the others."""

    who: str
    ranks: tuple[int, ...]
    step_s: float
    gain: float  # share of the step


@dataclass(frozen=True)
class SlowReport:
    step_s: float  # median, as measured
    replayed_s: float  # the same by the replay: how far it can be trusted
    what_ifs: tuple[WhatIf, ...]  # the largest gain first
    cause: str  # "" when nobody is slow
    evidence: tuple[str, ...]
    ranks: int
    steps: int
    changes: tuple[ChangePoint, ...] = ()

    @property
    def sentence(self) -> str:
        """ "Without rank 5: 1.9 s instead of 2.4 s per step, 21 % of 512 ranks (one rank always)"."""
        if not self.what_ifs:
            return f"No rank slows the others down: {duration(self.step_s)} per step, {self.steps} steps of {self.ranks} ranks."
        best = self.what_ifs[0]
        gain = f"{best.gain:.0%} of {self.ranks} ranks"
        return f"Without {best.who}: {duration(best.step_s)} instead of {duration(self.step_s)} per step, {gain} ({self.cause})."


@dataclass(frozen=True)
class _Event:
    """One collective as the replay sees it."""

    step: int
    ranks: np.ndarray  # indices
    own: np.ndarray  # seconds before it, by rank
    elements: np.ndarray
    at: float


def read_events(meetings: Sequence[Meetings]) -> tuple[tuple[int, ...], list[_Event]]:
    """The blocking collectives of all groups in the order in which they were released, with own times."""
    ranks = tuple(sorted({rank for one in meetings for rank in one.ranks}))
    index = {rank: i for i, rank in enumerate(ranks)}
    order = []
    for number, one in enumerate(meetings):
        released = one.arrived.max(axis=0)
        order += [(float(released[k]), number, k) for k in np.flatnonzero(one.blocks.any(axis=0))]
    free = np.full(len(ranks), np.nan)
    events = []
    for turn, (released, number, k) in enumerate(sorted(order)):
        one = meetings[number]
        members = np.array([index[rank] for rank in one.ranks])
        own = one.arrived[:, k] - free[members]
        free[members] = released
        if np.isnan(own).any() or (own < 0).any():
            continue  # its first call here, or one that another group overlaps
        step = int(one.step[k]) if one.step[k] >= 0 else turn
        events.append(_Event(step, members, own, one.elements[:, k], released))
    return ranks, events


def replay(events: Sequence[_Event], count: int, ideal: Collection[int] = ()) -> dict[int, float]:
    """Step -> seconds, with these ranks (as indices) as fast as the median of the others in the same collective."""
    free = np.zeros(count)
    chosen = np.zeros(count, bool)
    chosen[list(ideal)] = True
    ends: dict[int, float] = {}
    for event in events:
        own = event.own
        slow = chosen[event.ranks]
        if slow.any() and not slow.all():
            own = np.where(slow, np.minimum(own, np.median(own[~slow])), own)
        free[event.ranks] = float((free[event.ranks] + own).max())
        ends[event.step] = float(free.max())
    steps = sorted(ends)
    return {step: ends[step] - ends[before] for before, step in itertools.pairwise(steps)}


def own_times(ranks: tuple[int, ...], events: Sequence[_Event]) -> OwnTimes:
    steps = sorted({event.step for event in events})[1:]  # the first is cut
    column = {step: k for k, step in enumerate(steps)}
    own, at = np.zeros((len(ranks), len(steps))), np.zeros(len(steps))
    for event in events:
        if event.step in column:
            own[event.ranks, column[event.step]] += event.own
            at[column[event.step]] = event.at
    took = np.diff(at, prepend=at[:1]) if len(at) else at
    return OwnTimes(ranks, np.array(steps), at, own, took)


def find_slow(traces: Sequence[RankTrace], saves: Collection[int] = ()) -> SlowReport | None:
    """What slow ranks, nodes and groups cost; None when the boxes hold too few steps. `saves`: steps with a save."""
    meetings = find_meetings(traces)
    ranks, events = read_events(meetings)
    times = own_times(ranks, events)
    if len(ranks) < 2 or len(times.steps) < MIN_STEPS:
        return None
    base = _typical(replay(events, len(ranks)))
    hosts: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        if trace.header.rank in ranks and trace.header.host:
            hosts[trace.header.host].append(ranks.index(trace.header.rank))
    found = []
    for who, members in _candidates(times, hosts, meetings).items():
        step_s = _typical(replay(events, len(ranks), members))
        found.append(WhatIf(who, tuple(ranks[i] for i in members), step_s, 1 - step_s / max(base, 1e-9)))
    gains = sorted(
        (one for one in found if one.gain >= MIN_GAIN), key=lambda one: (-round(one.gain, 2), len(one.ranks))
    )
    cause, evidence = _classify(times, events, gains, saves)
    changes = tuple(
        change for i, rank in enumerate(ranks) if (change := rank_change(times, i, rank)) is not None
    )
    if changes and gains and set(gains[0].ranks) & {one.rank for one in changes} and cause == ALWAYS:
        cause = "one rank since a moment"
    evidence += tuple(one.sentence for one in changes)
    step_s = float(np.median(times.step_s[1:])) if len(times.step_s) > 1 else base
    return SlowReport(step_s, base, tuple(gains), cause, evidence, len(ranks), len(times.steps), changes)


def _typical(steps: Mapping[int, float]) -> float:
    """Mean without the longest twentieth: evaluation and saves are in there, and rare delays still count."""
    values = np.sort(np.array(list(steps.values())))
    kept = values[: max(1, int(np.ceil(len(values) * 0.95)))]
    return float(kept.mean()) if len(kept) else 0.0


def _candidates(
    times: OwnTimes, hosts: Mapping[str, list[int]], meetings: Sequence[Meetings]
) -> dict[str, list[int]]:
    """Who may be made faster: the ranks with the most own time, each node, each group of some ranks, and all alike."""
    late = (times.own - np.median(times.own, axis=0)).clip(0).sum(axis=1)
    found = {f"rank {times.ranks[i]}": [int(i)] for i in np.argsort(-late)[:4]}
    if len(hosts) > 1:
        found |= {f"node {host}": members for host, members in sorted(hosts.items())[:64]}
    for one in meetings[:64]:
        if 1 < len(one.ranks) < len(times.ranks):
            found[f"group of {ranks_text(one.ranks)}"] = [times.ranks.index(rank) for rank in one.ranks]
    return found


ALWAYS, TURNS, LENGTH, SAVING = "one rank always", "different ranks in turn", "input length", "saving"


def _classify(
    times: OwnTimes, events: Sequence[_Event], gains: Sequence[WhatIf], saves: Collection[int]
) -> tuple[str, tuple[str, ...]]:
    """Why the slowest are slow, and what shows it."""
    excess = (times.own - np.median(times.own, axis=0)).clip(0)
    top, worst = excess.max(axis=0), excess.argmax(axis=0)
    typical = max(float(np.median(times.step_s)), 1e-9)
    slow = top > MIN_GAIN * typical
    if not slow.any():
        return "", ()
    saving = np.isin(times.steps, list(saves))
    if saves and float(top[saving].sum()) > 0.6 * float(top.sum()):
        return SAVING, (
            f"{int(saving.sum())} of {len(times.steps)} steps hold a save, and most of the delay",
        )
    if (link := _length_link(events)) > 0.7:
        return LENGTH, (f"own time follows the size of the input (correlation {link:.2f})",)
    share = np.bincount(worst[slow], minlength=len(times.ranks)) / slow.sum()
    first = int(share.argmax())
    told = f"rank {times.ranks[first]} was the slowest in {share[first]:.0%} of {int(slow.sum())} slow steps"
    if gains and len(gains[0].ranks) > 1:
        return ("node" if gains[0].who.startswith("node") else "group"), (
            f"ranks {rank_list(gains[0].ranks)} are slow together",
            told,
        )
    if share[first] >= OFTEN:
        return ALWAYS, (told,)
    spread = f"{int((share > 0).sum())} ranks were the slowest at some time"
    return TURNS, (spread, told, "garbage collection and data loading look like this")


def _length_link(events: Sequence[_Event]) -> float:
    """Correlation of own times with the sizes of inputs, where sizes differ between ranks."""
    pairs = [(e.own - e.own.mean(), e.elements - e.elements.mean()) for e in events if np.ptp(e.elements) > 0]
    if len(pairs) < MIN_STEPS:
        return 0.0
    own, size = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    if own.std() == 0 or size.std() == 0:
        return 0.0
    return float(np.corrcoef(own, size)[0, 1])


def rank_change(times: OwnTimes, index: int, rank: int) -> ChangePoint | None:
    """When a rank became slower than the others, if it did."""
    others = np.median(np.delete(times.own, index, axis=0), axis=0)
    return find_change(times.own[index] - others, others, times.at, rank)


@dataclass
class Lateness:
    """The own times of a running job's last steps, to notice when a rank becomes slow. One for each node."""

    times: OwnTimes | None = None
    _told: dict[int, float] = field(default_factory=dict)  # rank -> when it became slow

    def add(self, traces: Sequence[RankTrace]) -> list[ChangePoint]:
        """With newer boxes of the same ranks: who became slow, each once."""
        ranks, events = read_events(find_meetings(traces))
        if len(ranks) < MIN_RANKS:
            return []
        new, old = own_times(ranks, events), self.times
        if old is not None and old.ranks == new.ranks and len(old.steps) and len(new.steps):
            fresh = new.steps > old.steps[-1]
            new = OwnTimes(
                ranks,
                np.concatenate([old.steps, new.steps[fresh]])[-MEMORY:],
                np.concatenate([old.at, new.at[fresh]])[-MEMORY:],
                np.concatenate([old.own, new.own[:, fresh]], axis=1)[:, -MEMORY:],
                np.concatenate([old.step_s, new.step_s[fresh]])[-MEMORY:],
            )
        self.times = new
        found = []
        for index, rank in enumerate(ranks):
            change = rank_change(new, index, rank)
            if change is not None and change.at > self._told.get(rank, 0.0) + AGAIN_S:
                self._told[rank] = change.at
                found.append(change)
        return found
