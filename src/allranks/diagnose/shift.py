"""An extra or a skipped call: from some point on, one rank's calls fit the others' when moved by one.

Sequences are compared by signature and stack together, so that an extra all_reduce of the same size is found where
it was made, and not where the last rank waits in vain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from allranks.diagnose.call_habits import breaks_habit, is_inserted, lane_keys
from allranks.diagnose.job import GroupView, Job, Lane

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
