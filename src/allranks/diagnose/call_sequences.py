"""Sequences of calls compared. What a rank has always done next: programs repeat themselves, and a step out of the round shows
who left it. An extra or a skipped call: from some point on, one rank's calls fit the others' when moved by one. Pure.

Sequences are compared by signature and stack together, so that an extra all_reduce of the same size is found where
it was made, and not where the last rank waits without an answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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


def lane_keys(job: Job, lane: Lane, with_stacks: bool = True) -> np.ndarray:
    """One number per call of a lane: equal on two ranks when they did the same thing at the same line."""
    view = job.ranks[lane.rank]
    sig: np.ndarray = view.sig[lane.rows].astype(np.uint64)
    if not with_stacks:
        return sig
    mixed: np.ndarray = sig ^ (view.stack[lane.rows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return mixed


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


#: At most this many extra or skipped calls in a row are looked for.
MAX_SHIFT = 4


@dataclass(frozen=True)
class Shift:
    """`rank` made `count` calls more (extra) or fewer (not extra) than the others, from `seq` on."""

    rank: int
    seq: int
    count: int
    extra: bool
    agreeing: int  # calls behind the shift that fit when moved
    told: bool = True  # False: of two ranks, nothing shows which one left its round


def find_shift(job: Job, group: GroupView, rank: int, reference: int, seq: int) -> Shift | None:
    """Whether `rank` and `reference`, who differ at `seq`, agree from some point on when one is moved.

    The two may have parted before `seq`, by a call of the same kind from another line. At one and the same line
    there is no shift: the call is the right one with the wrong arguments.
    """
    mine, theirs = group.lanes[rank], group.lanes[reference]
    if telling_stacks(job, mine):
        if _stack_at(job, mine, seq) == _stack_at(job, theirs, seq):
            return None
        found = _shift_from(job, mine, theirs, _first_difference(job, mine, theirs, seq), True)
        if found is not None:
            return found
    return _next_in_history(job, mine, theirs, seq) or _shift_from(job, mine, theirs, seq, False)


def telling_stacks(job: Job, lane: Lane) -> bool:
    """Whether stacks tell calls apart: generated or stripped dumps show the same one everywhere."""
    stacks = job.ranks[lane.rank].stack[lane.rows]
    return bool((stacks != stacks[0]).any())


def _stack_at(job: Job, lane: Lane, seq: int) -> int:
    return int(job.ranks[lane.rank].stack[lane.row(seq)])


def _first_difference(job: Job, mine: Lane, theirs: Lane, seq: int) -> int:
    """Where call sites part for good on the way to `seq`."""
    low = max(mine.first, theirs.first)
    one, two = _window(job, mine, low, seq), _window(job, theirs, low, seq)
    if len(one) != len(two):
        return seq
    different = np.flatnonzero(one != two)
    # The last run of differences that reaches `seq`.
    start = len(different) - 1
    while start > 0 and different[start - 1] == different[start] - 1:
        start -= 1
    return low + int(different[start]) if len(different) else seq


def _shift_from(job: Job, mine: Lane, theirs: Lane, seq: int, with_stacks: bool) -> Shift | None:
    one, two = _from(job, mine, seq, with_stacks), _from(job, theirs, seq, with_stacks)
    found = best_shift(one, two)
    if found is None:
        return None
    count, extra, agreeing = found
    length = min(len(one), len(two))
    replaced = length > 1 and bool((one[1:length] == two[1:length]).all())
    if replaced and (len(one) > len(two)) != extra and len(one) != len(two):
        return None
    if replaced and len(one) == len(two):
        return None  # the calls behind it fit where they are: one call was changed, none added
    return Shift(mine.rank, seq, count, extra, agreeing)


def _next_in_history(job: Job, mine: Lane, theirs: Lane, seq: int) -> Shift | None:
    """A skip that hung at once: what the rank called is what has always come after what the others called."""
    own, other = lane_keys(job, mine), lane_keys(job, theirs)
    at = int(np.searchsorted(theirs.seqs, seq))
    called = own[int(np.searchsorted(mine.seqs, seq))]
    earlier = np.flatnonzero(other[:at] == other[at])
    earlier = earlier[earlier + 1 < at]
    if len(earlier) >= 2 and bool((other[earlier + 1] == called).all()) and called != other[at]:
        return Shift(mine.rank, seq, 1, False, 1)
    return None


def best_shift(mine: np.ndarray, theirs: np.ndarray) -> tuple[int, bool, int] | None:
    """(count, extra, agreeing calls) of the smallest move that makes the two agree to the end of the shorter."""
    options = []
    for count in range(1, MAX_SHIFT + 1):
        for extra, moved, still in ((True, mine, theirs), (False, theirs, mine)):
            length = min(len(moved) - count, len(still))
            if length >= 1 and bool((moved[count : count + length] == still[:length]).all()):
                options.append((count, extra, length))
        if options:
            break
    if not options:
        return None
    # In a periodic program both directions fit: then whoever made more calls has the extra one.
    longer = len(mine) >= len(theirs)
    return max(options, key=lambda option: (option[2], option[1] == longer))


def find_stack_shift(job: Job, group: GroupView) -> Shift | None:
    """An extra or skipped call of the same kind and size, visible only in the stacks."""
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    windows, low = _windows(job, lanes)
    if len(windows) < 2:
        return None
    prints = {rank: window.tobytes() for rank, window in windows.items()}
    common, votes = Counter(prints.values()).most_common(1)[0]
    odd = sorted(rank for rank, text in prints.items() if text != common)
    if not odd or (votes <= len(lanes) // 2 and len(lanes) > 2) or len(odd) > 64:
        return None
    usual = max((lane for lane in lanes if prints[lane.rank] == common), key=lambda lane: lane.last)
    found = [_shift_of(job, group, rank, usual, windows, low) for rank in odd]
    shifts = [shift for shift in found if shift is not None]
    return max(shifts, key=lambda shift: (shift.extra, shift.agreeing, -shift.rank), default=None)


def _windows(job: Job, lanes: list[Lane]) -> tuple[dict[int, np.ndarray], int]:
    """(the calls that all lanes know, by rank; the first of them): nothing when a number is missing in one."""
    low = max((lane.first for lane in lanes), default=0)
    high = min((lane.last for lane in lanes), default=-1)
    windows = {lane.rank: _window(job, lane, low, high) for lane in lanes} if high >= low else {}
    whole = all(len(window) == high - low + 1 for window in windows.values())
    return windows if whole else {}, low


def _shift_of(
    job: Job, group: GroupView, rank: int, usual: Lane, windows: dict[int, np.ndarray], low: int
) -> Shift | None:
    lane = group.lanes[rank]
    pair = len(group.lanes) == 2
    if pair and usual.last > lane.last:
        lane, usual = usual, lane
    at = low + int(np.flatnonzero(windows[lane.rank] != windows[usual.rank])[0])
    if _stack_at(job, lane, at) == _stack_at(job, usual, at):
        return None
    if is_inserted(job.ranks[rank], group.lanes[rank].row(at)):
        return Shift(rank, at, 1, True, 1)
    shift = _shift_from(job, lane, usual, at, True)
    if shift is None or lane.last != usual.last:
        return by_habit(job, shift, lane, usual) if shift is not None and pair else shift
    other = _shift_from(job, usual, lane, at, True)
    # A program that alternates between two lines fits in both directions: that alone is no evidence.
    if other is not None and other.extra == shift.extra:
        return _odd_by_habit(job, shift, lane, usual)
    if shift.agreeing < 2:
        return None
    return by_habit(job, shift, lane, usual) if pair else shift


def _odd_by_habit(job: Job, shift: Shift, one: Lane, two: Lane) -> Shift | None:
    """Where both directions fit, the rank that left its own round made the difference."""
    rows = ((lane, lane.row(shift.seq)) for lane in (one, two))
    odd = [lane for lane, row in rows if breaks_habit(job.ranks[lane.rank], row)]
    if len(odd) != 1:
        return None
    own = lane_keys(job, odd[0])
    at = int(np.searchsorted(odd[0].seqs, shift.seq))
    known = bool((own[:at] == own[at]).any())
    return Shift(odd[0].rank, shift.seq, shift.count, not known, shift.agreeing)


def by_habit(job: Job, shift: Shift, lane: Lane, other: Lane) -> Shift:
    """Between two ranks an extra call of one is a skipped call of the other: skipped, if the other has made it before, and
    it was not the first that left its own round."""
    maker, avoider = (lane, other) if shift.extra else (other, lane)
    made = lane_keys(job, maker)[int(np.searchsorted(maker.seqs, shift.seq))]
    rows = [(job.ranks[each.rank], each.row(shift.seq)) for each in (maker, avoider)]
    left = [row >= 0 and breaks_habit(view, row) for view, row in rows]
    own, at = lane_keys(job, avoider), int(np.searchsorted(avoider.seqs, shift.seq))
    skipped = bool((own == made).any()) and left != [True, False]
    told = left == [True, False] or not skipped
    if left == [False, True]:  # a call that it never made before may be the end of its loop
        told = bool((own[:at] == own[at]).any())
    rank = avoider.rank if skipped else maker.rank
    return Shift(rank, shift.seq, shift.count, not skipped, shift.agreeing, told)


def _from(job: Job, lane: Lane, seq: int, with_stacks: bool) -> np.ndarray:
    return lane_keys(job, lane, with_stacks)[int(np.searchsorted(lane.seqs, seq)) :]


def _window(job: Job, lane: Lane, low: int, high: int) -> np.ndarray:
    start, end = np.searchsorted(lane.seqs, [low, high + 1])
    return lane_keys(job, lane)[int(start) : int(end)]
