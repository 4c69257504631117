"""Sequences of calls compared. What a rank has always done next: programs repeat themselves, and a step out of the round shows
who left it. An extra or a skipped call: from some point on, one rank's calls fit the others' when moved by one. Pure.

Sequences are compared by signature and stack together, so that an extra all_reduce of the same size is found where
it was made, and not where the last rank waits without an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from allranks.diagnose.job import GroupView, Job, Lane, RankCalls
from allranks.diagnose.ops import Family, is_p2p
from allranks.model.trace import Flag

#: So many calls before a point tell which point of the program it is.
CONTEXT = 12
_ODD = 0x9E3779B97F4A7C1  # spreads partners over all bits


def step_keys(view: RankCalls) -> np.ndarray:
    """One number per call of a rank, over all groups: equal when group, operation, sizes, partner and line are."""
    keys: np.ndarray = view.sig ^ (view.stack.astype(np.int64) << 20) ^ (view.group.astype(np.int64) << 44)
    if view.has_p2p:
        keys = keys ^ (view.trace.calls["peer"].astype(np.int64) + 1) * _ODD
    return keys


def lane_keys(job: Job, lane: Lane) -> np.ndarray:
    """One number per call of a lane: equal on two ranks when they did the same thing at the same line."""
    view = job.ranks[lane.rank]
    lines = view.stack[lane.rows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed: np.ndarray = view.sig[lane.rows].astype(np.uint64) ^ lines
    return mixed


def common_calls(job: Job, lanes: list[Lane]) -> tuple[dict[int, np.ndarray], int]:
    """(the keys of the calls that all lanes know, by rank; the first number): nothing when one is missing in a lane."""
    low = max((lane.first for lane in lanes), default=0)
    high = min((lane.last for lane in lanes), default=-1)
    ends = {lane.rank: np.searchsorted(lane.seqs, [low, high + 1]) for lane in lanes if high >= low}
    if any(end - start != high - low + 1 for start, end in ends.values()):
        return {}, low
    return {lane.rank: lane_keys(job, lane)[slice(*ends[lane.rank])] for lane in lanes if ends}, low


def successors(keys: np.ndarray, row: int) -> np.ndarray:
    """Rows that followed, in earlier rounds, the two calls before `row`; of one call when two never came before."""
    if row < 1:
        return np.zeros(0, np.int64)
    same: np.ndarray = np.flatnonzero(keys[: row - 1] == keys[row - 1]) + 1
    if row >= 2:
        twice = same[(same >= 2) & (keys[np.maximum(same - 2, 0)] == keys[row - 2])]
        same = twice if len(twice) else same
    return same[same < row]


def usual_next(calls: np.ndarray, at: int) -> np.ndarray:
    """Indices of what followed, in earlier rounds, the calls before `at`: the longest run that occurred before."""
    found = np.arange(1, at)
    for back in range(1, min(CONTEXT, at) + 1):
        alike = found[(found >= back)]
        alike = alike[calls[alike - back] == calls[at - back]]
        if not len(alike):
            return found if back > 1 else np.zeros(0, np.int64)
        found = alike
    return found if at else np.zeros(0, np.int64)


def broken_habit(view: RankCalls, row: int) -> int | None:
    """The row of a call that the rank has always made at this point of its rounds and now has not; None when it has."""
    keys = step_keys(view)
    usual = usual_next(keys[: row + 1], row)
    if not len(usual) or bool((keys[usual] == keys[row]).any()):
        return None
    return int(usual[-1])


def breaks_habit(view: RankCalls, row: int) -> bool:
    """Whether the call is none of those that followed at this point in earlier rounds."""
    return broken_habit(view, row) is not None


def is_inserted(view: RankCalls, row: int) -> bool:
    """Whether the call was never made before, and right behind it comes what has always come here."""
    keys = step_keys(view)
    usual = successors(keys, row)
    if not len(usual) or row + 1 >= len(keys) or bool((keys[:row] == keys[row]).any()):
        return False
    return bool((keys[usual] == keys[row + 1]).any())


def owes_message(view: RankCalls, row: int, peer: int, sends: bool) -> bool:
    """Whether the rank has, up to this call, sent a partner (or received of it) less than it had at the same point of every
    earlier round. A round begins with the rank's rarest collective."""
    begins = _rounds(view, row)
    if len(begins) < 2:
        return False
    counts = messages_per_round(view, row, peer, sends)
    keys = step_keys(view)
    whole = counts if keys[row] == keys[begins[-1]] else counts[:-1]  # the round may end with this call
    if len(whole) > 1 and whole[-1] < min(whole[:-1]):
        return True
    calls = view.trace.calls[: row + 1]
    with_peer = (calls["peer"] == peer) & (view.group[: row + 1] == view.group[row])
    same = with_peer & (view.family[: row + 1] == view.family[row])
    other = with_peer & (view.family[: row + 1] == int(Family.SEND if sends else Family.RECV))
    count, now = int(same[begins[-1] :].sum()), int(other[begins[-1] :].sum())
    earlier = []
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        alike = np.flatnonzero(same[begin:end])
        if len(alike) >= count > 0:
            earlier.append(int(other[begin : begin + int(alike[count - 1]) + 1].sum()))
    return bool(earlier) and now < min(earlier)


def messages_per_round(view: RankCalls, row: int, peer: int, sends: bool) -> list[int]:
    """How many messages to (or from) a partner the rank had posted in each round, the last one up to `row` alone."""
    begins = _rounds(view, row).tolist()
    family = int(Family.SEND if sends else Family.RECV)
    mine = (view.trace.calls["peer"] == peer) & (view.family == family)
    ends = [*begins[1:], row] if begins else []
    return [int(mine[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]


def _rounds(view: RankCalls, row: int) -> np.ndarray:
    """Where the rank's rounds begin, before a call: the first with the ring, if nothing was lost."""
    messages = (view.trace.calls["flags"][:row] & int(Flag.P2P | Flag.COALESCED_PART)) != 0
    collective = np.flatnonzero(~messages & ~is_p2p(view.family[:row]))
    own = step_keys(view)[:row][collective]
    keys, counts = np.unique(own, return_counts=True)
    if (counts > 1).any():  # one that was made once parts nothing: torch's first call takes other lines
        keys, counts = keys[counts > 1], counts[counts > 1]
    begins: np.ndarray = collective[own == keys[np.argmin(counts)]] if len(keys) else collective
    whole = int(view.trace.calls["begin"][0]) == 1
    return np.insert(begins, 0, 0) if whole else begins


def differences(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Per call of the shorter: whether the two differ."""
    length = min(len(mine), len(theirs))
    differences: np.ndarray = mine[:length] != theirs[:length]
    return differences


#: (what the calls are, their steps, their lines), an entry for each call.
Calls = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class CallPair:
    """The calls of two ranks in one group from the first number that both know."""

    rank: int
    reference: int
    low: int  # sequence number of index 0
    mine: np.ndarray
    theirs: np.ndarray
    my_steps: np.ndarray
    their_steps: np.ndarray
    their_lines: np.ndarray
    one_line: np.ndarray  # per number that both know: whether they called from the same line

    def on_one_line(self, at: int) -> bool:
        """Whether both called from one line, in a program of several: the right call with the wrong arguments."""
        return bool(self.one_line[at]) and bool((self.their_lines != self.their_lines[0]).any())

    @staticmethod
    def of(job: Job, group: GroupView, rank: int, reference: int) -> CallPair | None:
        """None when a number is missing in between or the two know no common call."""
        lanes = group.lanes[rank], group.lanes[reference]
        low = max(lane.first for lane in lanes)
        parts = [calls_from(job, lane, low) for lane in lanes]
        if any(part is None for part in parts):
            return None
        return CallPair._of_parts(rank, reference, low, *(part for part in parts if part is not None))

    @staticmethod
    def _of_parts(rank: int, reference: int, low: int, one: Calls, two: Calls) -> CallPair:
        (mine, my_steps, my_lines), (theirs, their_steps, their_lines) = one, two
        one_line = ~differences(my_lines, their_lines)
        return CallPair(rank, reference, low, mine, theirs, my_steps, their_steps, their_lines, one_line)

    @staticmethod
    def over_groups(job: Job, group: GroupView, rank: int, reference: int) -> CallPair | None:
        """All calls of the two, of any group, from the first call of this group that both know; indices count from 0.

        A group of one rank is taken for the group of the other that it made at the same point of its program.
        """
        views = job.ranks[rank], job.ranks[reference]
        lanes = group.lanes[rank], group.lanes[reference]
        low = max(lane.first for lane in lanes)
        starts = [lane.row(low) for lane in lanes]
        if all(len(view.trace.calls) and int(view.trace.calls["begin"][0]) == 1 for view in views):
            starts = [0, 0]
        if min(starts) < 0:
            return None
        parts = []
        for view, start in zip(views, starts, strict=True):
            calls, stack = view.trace.calls[start:], view.stack[start:]
            whose = calls["group"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            key = view.sig[start:].astype(np.uint64) ^ (stack.astype(np.uint64) << np.uint64(20)) ^ whose
            parts.append((key, calls["step"].astype(np.int64), stack))
        return CallPair._of_parts(rank, reference, starts[1], *parts)


def calls_from(job: Job, lane: Lane, low: int) -> Calls | None:
    """The calls of a lane from a number on; None when one is missing."""
    start = int(np.searchsorted(lane.seqs, low))
    rows = lane.rows[start:]
    if not len(rows) or int(lane.seqs[-1]) - low != len(rows) - 1:
        return None
    view = job.ranks[lane.rank]
    return lane_keys(job, lane)[start:], view.trace.calls["step"][rows].astype(np.int64), view.stack[rows]


#: At most so many calls are skipped, added or swapped in a row.
MAX_CALLS = 4

Kind = Literal["skipped", "extra", "swapped"]


@dataclass(frozen=True)
class Divergence:
    """`rank` left the program of `reference` at call `seq` of the group."""

    rank: int
    reference: int
    seq: int
    kind: Kind
    count: int  # calls skipped, added, or between the two that are swapped
    confidence: float
    reason: str  # what shows it, as a sentence
    either: bool = False  # an added call and an early end of a loop look the same here
    agreeing: int = 0  # calls behind it that fit when one of the two is moved; 0: not compared so


def of_two(job: Job, shift: Divergence, lane: Lane, other: Lane) -> Divergence:
    """Between two ranks an extra call of one is a skipped call of the other: skipped, if the other has made it before, and
    it was not the first that left its own round."""
    maker, avoider = (lane, other) if shift.kind == "extra" else (other, lane)
    made = lane_keys(job, maker)[int(np.searchsorted(maker.seqs, shift.seq))]
    rows = [(job.ranks[each.rank], each.row(shift.seq)) for each in (maker, avoider)]
    left = [row >= 0 and breaks_habit(view, row) for view, row in rows]
    own, at = lane_keys(job, avoider), int(np.searchsorted(avoider.seqs, shift.seq))
    skipped = bool((own == made).any()) and left != [True, False]
    told = left == [True, False] or not skipped
    if left == [False, True]:  # a call that it never made before may be the end of its loop
        told = bool((own[:at] == own[at]).any())
    guilty, innocent = (avoider, maker) if skipped else (maker, avoider)
    kind: Kind = "skipped" if skipped else "extra"
    found = replace(shift, rank=guilty.rank, reference=innocent.rank, kind=kind, either=not told)
    return replace(found, confidence=0.8 if told else 0.55)
