"""The one alignment: the calls of a rank against those of the others, and against its own earlier rounds. Pure.

Sequence numbers count calls, not what a program meant: a rank that skips an all_reduce meets the others' with its next one, and
the numbers disagree much later. So calls are compared by what they are (operation, sizes, line). Where two ranks differ, four
things tell what happened, in this order: the training step that each call was made in; what lies behind, which fits again when
one of the two is moved; what has always come next at this point in earlier rounds; and what most ranks do. The result is a
`CallDifference`: calls skipped, added, swapped or changed. All findings about calls that differ are cases of it; `odd_rank` asks
for it where the calls of one collective do not fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from allranks.diagnosis.job import GroupView, Job, Lane, RankCalls
from allranks.diagnosis.kinds import say
from allranks.model.formatting import count as count_of

#: So many calls before a point tell which point of the program it is.
CONTEXT = 12
#: At most so many calls are skipped, added or swapped in a row; in one line of a program, or in all rounds alike, this many.
MAX_CALLS, MAX_BLOCK = 4, 256
#: So many differences between two whole programs are looked at, and so many other ranks.
MAX_DIFFERENCES = ASKED_RANKS = 64
_ODD = 0x9E3779B97F4A7C1  # spreads partners over all bits
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Kind = Literal["skipped", "extra", "swapped", "changed"]


@dataclass(frozen=True)
class CallDifference:
    """`ranks` differ from `reference` at call `seq` of a group."""

    ranks: tuple[int, ...]
    kind: Kind
    confidence: float
    reason: str  # what shows it, as a sentence
    reference: int = -1
    seq: int = -1
    count: int = 1  # calls skipped, added, or between the two that are swapped
    either: bool = False  # an added call and an early end of a loop look the same here
    agreeing: int = 0  # calls behind it that fit when one of the two is moved; 0: not compared so
    loop: bool = False  # the added call has come behind this one before: perhaps it comes behind a loop

    @property
    def rank(self) -> int:
        return self.ranks[0]


def step_keys(view: RankCalls) -> np.ndarray:
    """One number per call of a rank, over all groups: equal when group, operation, sizes, partner and line are."""
    keys: np.ndarray = view.sig ^ (view.stack.astype(np.int64) << 20) ^ (view.group.astype(np.int64) << 44)
    if view.has_p2p:
        keys = keys ^ (view.trace.calls["peer"].astype(np.int64) + 1) * _ODD
    return keys


def lane_keys(job: Job, lane: Lane) -> np.ndarray:
    """One number per call of a lane: equal on two ranks when they did the same thing at the same line."""
    view = job.ranks[lane.rank]
    mixed: np.ndarray = (
        view.meets[lane.rows].astype(np.uint64) ^ view.stack[lane.rows].astype(np.uint64) * _SPREAD
    )
    return mixed


def usual_next(calls: np.ndarray, at: int, context: int = CONTEXT) -> np.ndarray:
    """Indices of what followed, in earlier rounds, the calls before `at`: the longest run that occurred before."""
    found = np.arange(1, at)
    for back in range(1, min(context, at) + 1):
        alike = found[(found >= back)]
        alike = alike[calls[alike - back] == calls[at - back]]
        if not len(alike):
            return found if back > 1 else alike
        found = alike
    return found if at else np.zeros(0, np.int64)


def broken_habit(view: RankCalls, row: int) -> int | None:
    """The row of a call that the rank has always made at this point of its rounds and now has not; None when it has."""
    keys = step_keys(view)
    usual = usual_next(keys[: row + 1], row)
    if not len(usual) or bool((keys[usual] == keys[row]).any()):
        return None
    return int(usual[-1])


def is_new(view: RankCalls, row: int) -> bool:
    """Whether the rank has never made this call before, and at this point of its rounds always another."""
    keys = step_keys(view)
    return broken_habit(view, row) is not None and not bool((keys[:row] == keys[row]).any())


def _is_inserted(view: RankCalls, row: int) -> bool:
    """Whether the call was never made before, and right behind it comes what has always come here."""
    keys = step_keys(view)
    usual = usual_next(keys, row, 2)
    if not len(usual) or row + 1 >= len(keys) or bool((keys[:row] == keys[row]).any()):
        return False
    return bool((keys[usual] == keys[row + 1]).any())


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
        one, two = (_calls_from(job, lane, low) for lane in lanes)
        return None if one is None or two is None else CallPair._of_parts(rank, reference, low, one, two)

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
            whose = calls["group"].astype(np.uint64) * _SPREAD
            key = view.meets[start:].astype(np.uint64) ^ (stack.astype(np.uint64) << np.uint64(20)) ^ whose
            parts.append((key, calls["step"].astype(np.int64), stack))
        return CallPair._of_parts(rank, reference, starts[1], *parts)

    def differs(
        self,
        at: int,
        kind: Kind,
        count: int,
        sure: float,
        reason: str,
        either: bool = False,
        agreeing: int = 0,
    ) -> CallDifference:
        """That the rank left the program of the reference at an index."""
        where = (self.reference, self.low + at, count)
        return CallDifference((self.rank,), kind, sure, reason, *where, either, agreeing)

    # ---- by step marks

    def by_steps(self) -> CallDifference | None:
        """From some call on the two are in different training steps, and never again in the same."""
        length = min(len(self.mine), len(self.theirs))
        ahead = self.my_steps[:length] - self.their_steps[:length]
        apart = np.flatnonzero((ahead != 0) | differences(self.mine, self.theirs))
        at = length - len(apart)
        if (
            not len(apart)
            or at == 0
            or apart[0] != at
            or ahead[at] == 0
            or (ahead[at:] * ahead[at] < 0).any()
        ):
            return None
        if min(self.my_steps[at:length].min(), self.their_steps[at:length].min()) < 0:
            return None
        skips = bool(ahead[at] > 0)
        step = int(self.their_steps[at] if skips else self.my_steps[at])
        made = int((self.my_steps == step).sum()), int((self.their_steps == step).sum())
        marks = {"mine": int(self.my_steps[at]), "theirs": int(self.their_steps[at]), "step": step}
        counts = {"made": count_of(made[0], "call"), "other_made": made[1]}
        reason = say("steps", rank=self.rank, other=self.reference, seq=self.low + at, **marks, **counts)
        count = max(1, min(MAX_CALLS, abs(made[1] - made[0])))
        return self.differs(at, "skipped" if skips else "extra", count, 0.93, reason)

    def unusual_in_step(self, seq: int) -> int | None:
        """Which of the two made, in the step of the divergence, another number of calls than in its steps before; if both
        did, the one that made none at all, as it never had before."""
        step = min(int(self.my_steps[seq - self.low]), int(self.their_steps[seq - self.low]))
        odd, none = [], []
        for rank, steps in ((self.rank, self.my_steps), (self.reference, self.their_steps)):
            before = steps[(steps < step) & (steps > steps[0])]
            counts = np.unique(before, return_counts=True)[1]
            if not len(counts):
                return None
            made = int((steps == step).sum())
            if not bool((counts == made).any()):
                odd.append(rank)
            if not made and step - 1 == int(before[-1]):
                none.append(rank)
        found = odd if len(odd) == 1 else none
        return found[0] if len(found) == 1 else None

    # ---- by what lies behind

    def swapped(self, at: int) -> CallDifference | None:
        """Both made both calls, in different order, and what lies behind fits where it is."""
        mine, theirs = self.mine[at : at + MAX_CALLS + 1], self.theirs[at : at + MAX_CALLS + 1]
        later, earlier = np.flatnonzero(mine == theirs[0]), np.flatnonzero(theirs == mine[0])
        if not len(later) or not len(earlier):
            return None
        length = max(int(later[0]), int(earlier[0])) + 1
        same = sorted(mine[:length].tolist()) == sorted(theirs[:length].tolist())
        if not same or differences(self.mine[at + length :], self.theirs[at + length :]).any():
            return None
        last = self.low + at + int(later[0])
        reason = say("swapped", rank=self.rank, seq=self.low + at, last=last, other=self.reference)
        return self.differs(at, "swapped", int(later[0]), 0.9, reason)

    def moved(self, at: int, weak: bool = False) -> CallDifference | None:
        """The two fit again when one is moved from some call before `at` on; in place they have differed since. `weak`: one
        call that fits is enough, if one of the two made as many calls more."""
        kinds: tuple[Kind, ...] = ("skipped", "extra")
        moves = (self._move(at, count, kind, weak) for count in range(1, MAX_CALLS + 1) for kind in kinds)
        found = [move for move in moves if move is not None]
        return max(found, key=lambda move: move[:3])[3] if found else None

    def _move(
        self, at: int, count: int, kind: Kind, weak: bool
    ) -> tuple[int, bool, int, CallDifference] | None:
        """(how many calls fit better, whether the numbers of calls agree with it, fewest moved first, the difference)."""
        differs, skips = differences(self.mine, self.theirs), kind == "skipped"
        moved = differences(self.mine[0 if skips else count :], self.theirs[count if skips else 0 :])
        length = min(len(differs), len(moved))
        if length < 1:
            return None
        # Differences in place before d, and moved behind it, for every d; the last of equal ones is the certain one.
        behind = np.append(np.cumsum(moved[::-1])[::-1], 0)[: length + 1]
        total = np.append(0, np.cumsum(differs[:length])) + behind
        d = int(length - np.argmin(total[::-1]))
        agreeing, gain = len(moved) - d, int(differs.sum()) - int(total[d])
        more = len(self.mine) - len(self.theirs)
        counted = more == (-count if skips else count)
        fitting = min(agreeing, gain)
        enough = (counted and fitting > 0) if weak else (d > 0 and fitting > 1)
        if d > at or not differs[d] or not enough:
            return None
        if not more and not differs[d + count :].any():
            return None  # what lies behind fits where it is: a call was changed, none added or left out
        reason = say("moved", count=count, agreeing=agreeing, other=self.reference)
        found = self.differs(d, kind, count, min(0.95, 0.8 + 0.03 * agreeing), reason, agreeing=agreeing)
        # A program that alternates fits both ways: then who made more calls has the extra one.
        return gain, counted, -count, found

    # ---- by what has always come next

    def by_habit(self, at: int, outvoted: bool = False) -> CallDifference | None:
        """What has always come next at this point tells who left the round, and how."""
        known, usual = self.theirs[:at], usual_next(self.theirs, at)
        if not len(usual):
            return None
        expected, me, them = known[usual], self.mine[at], self.theirs[at]
        made_mine, made_theirs = bool((known == me).any()), bool((known == them).any())
        if self.one_line[at] and not (made_mine and made_theirs):
            return None  # the right call with the wrong arguments
        if bool((expected == me).all()) and not made_theirs:
            reason = say("as_always", rank=self.rank, other=self.reference)
            return self.differs(at, "extra", 1, 0.75, reason, True)
        if bool((expected == them).all()):
            left_out = self._left_out(at, usual, True) or self._left_loop(at)
            return left_out or self._added(at, len(usual), True, made_mine)
        if not outvoted or not bool((expected == them).any()):
            return None
        # Rounds with and without these calls: the two took different branches, or a loop was longer.
        again = bool(me == self.mine[at - 1])
        skipped = self._left_out(at, usual if again else usual[expected == them], False)
        if skipped is not None and skipped.kind == "skipped":
            return skipped
        return self._added(at, len(usual), False, made_mine and not again)

    def _added(self, at: int, rounds: int, always: bool, known: bool) -> CallDifference:
        """The rank made a call more; `known`: one that it has made before."""
        inserted = at + 1 < len(self.mine) and bool(self.mine[at + 1] == self.theirs[at])
        sure, reason = 0.85 if always and rounds > 1 else 0.7, say("here_before", rank=self.rank, all=always)
        came_so = (self.theirs[1:at] == self.mine[at]) & (self.theirs[: at - 1] == self.mine[at - 1])
        found = self.differs(at, "extra", 1, sure, reason, not inserted and not known)
        return replace(found, loop=not inserted and bool(came_so.any()))

    def _left_out(self, at: int, usual: np.ndarray, always: bool) -> CallDifference | None:
        """The rank is in the call that has always come, so many calls later, behind those which the others make now: it left
        these out. Several calls left out before a rare one: rather was the rare one added."""
        known, me = self.theirs[:at], self.mine[at]
        behind = np.flatnonzero(known == me)
        found = np.searchsorted(behind, usual, side="right")
        starts, found = usual[found < len(behind)], found[found < len(behind)]
        counts = behind[found] - starts
        if not len(counts) or counts[0] < 1 or counts[0] > MAX_BLOCK or bool((counts != counts[0]).any()):
            return None
        count, complete = int(counts[0]), len(starts) == len(usual)
        text, rank = count_of(count, "call"), self.rank
        if count > 1 and always and complete and self._of_one_line(int(usual[-1]), count):
            return self.differs(at, "skipped", count, 0.8, say("one_line", rank=rank, count=text))
        often = bool(((known[1:] == me) & (known[:-1] == me)).any())
        if always and count > 2 and often and self.mine[at - 1] == me and self.their_lines[at]:
            return None  # it makes this call several times in a row, and now once more; without lines it may be another one
        steps = self.their_steps
        usual_steps = steps[starts + count] - steps[starts - 1]
        if not bool((usual_steps == self.my_steps[at] - self.my_steps[at - 1]).any()):
            return None  # its step marks went on as they never do between these calls
        likely = count == 1 or len(behind) >= int((known == self.theirs[at]).sum())
        if count > MAX_CALLS:
            told = always and likely and complete and len(usual) > 1
            reason = say("made_more", rank=rank, count=text, all=True)
            return self.differs(at, "skipped", count, 0.8, reason) if told else None
        if not likely:
            reason = say("made_more", rank=rank, count=text, all=always)
            return self.differs(at, "extra", 1, 0.7, reason, True)
        sure = 0.7 if not always else 0.9 if len(starts) > 1 else 0.85
        return self.differs(at, "skipped", count, sure, say("made_too", rank=rank, all=always))

    def _of_one_line(self, start: int, count: int) -> bool:
        """Whether so many calls from an index on are all calls of one line of the program."""
        lines, line = self.their_lines, self.their_lines[start]
        alone = line and line != lines[start - 1] and line != lines[start + count]
        return bool(alone) and bool((lines[start : start + count] == line).all())

    def _left_loop(self, at: int) -> CallDifference | None:
        """The others repeat a call; the rank has stopped repeating it and is in one that it made before, more often."""
        me, known, them = self.mine[at], self.theirs[:at], self.theirs[at]
        more_often = int((known == me).sum()) >= int((known == them).sum())
        repeats = at > 1 and bool((known[-2:] == them).all())
        if not more_often or not repeats or self.my_steps[at] != self.their_steps[at]:
            return None
        return self.differs(at, "skipped", 1, 0.7, say("left_loop", rank=self.rank))

    # ---- together

    def first_difference(self, seq: int | None, outvoted: bool = True) -> CallDifference | None:
        """Where `rank` left the program of `reference`. `seq`: the call whose mismatch is to be explained, if there is one.
        `outvoted`: most ranks do as the reference does."""
        found = self.by_steps()
        if found is not None or seq is None:
            return found
        at, length = seq - self.low, min(len(self.mine), len(self.theirs))
        if not 0 <= at < length or self.mine[at] == self.theirs[at]:
            return None
        swapped = self.swapped(at)
        if swapped is not None and length - at - swapped.count > 2:
            return swapped  # and the calls behind it fit where they are
        return self.moved(at) or swapped or self.by_habit(self.apart_since(at), outvoted)

    def apart_since(self, at: int) -> int:
        """From where on the two have made no call alike until `at`: what they called may have fitted by chance."""
        same = np.flatnonzero(self.mine[:at] == self.theirs[:at])
        return int(same[-1]) + 1 if len(same) else 0


def _calls_from(job: Job, lane: Lane, low: int) -> Calls | None:
    """The calls of a lane from a number on; None when one is missing."""
    start = int(np.searchsorted(lane.seqs, low))
    rows = lane.rows[start:]
    if not len(rows) or int(lane.seqs[-1]) - low != len(rows) - 1:
        return None
    view = job.ranks[lane.rank]
    return lane_keys(job, lane)[start:], view.trace.calls["step"][rows].astype(np.int64), view.stack[rows]


def find_difference(
    job: Job, group: GroupView, rank: int, reference: int, seq: int | None = None, outvoted: bool = True
) -> CallDifference | None:
    """Where `rank` left the program of `reference` in a group."""
    pair = CallPair.of(job, group, rank, reference)
    return pair.first_difference(seq, outvoted) if pair is not None else None


def find_move(job: Job, group: GroupView, rank: int, reference: int, seq: int) -> CallDifference | None:
    """Whether the two, who differ at `seq`, agree from some call on when one is moved. At one and the same line, in a program of
    several, they do not: the call is the right one with the wrong arguments."""
    pair = CallPair.of(job, group, rank, reference)
    if pair is None or (pair.one_line[seq - pair.low] and (pair.their_lines != pair.their_lines[0]).any()):
        return None
    return pair.moved(seq - pair.low) or pair.moved(seq - pair.low, weak=True)


def find_skip_over_groups(job: Job, group: GroupView, rank: int, waiter: int) -> CallDifference | None:
    """A call of the group that `rank` left out between calls of other groups: sequence numbers hide it until the end, if all
    calls of the group look alike."""
    pair = CallPair.over_groups(job, group, rank, waiter)
    if pair is None:
        return None
    view = job.ranks[waiter]
    for at in np.flatnonzero(differences(pair.mine, pair.theirs))[:MAX_DIFFERENCES].tolist():
        found, row = pair.by_habit(at), pair.low + at  # of `over_groups`, `low` is the waiter's first row
        if found is None or found.kind != "skipped" or int(view.group[row]) != group.index:
            continue
        behind = slice(at, at + CONTEXT), slice(at + found.count, at + found.count + CONTEXT)
        if not differences(pair.mine[behind[0]], pair.theirs[behind[1]]).any():
            return replace(found, seq=int(view.trace.calls["seq"][row]))
    return None


def odd_one(job: Job, group: GroupView, one: int, two: int, seq: int | None = None) -> CallDifference | None:
    """Of two ranks that differ, where the one that left its own round left it; None when nothing tells which."""
    pairs = [pair for a, b in ((one, two), (two, one)) if (pair := CallPair.of(job, group, a, b)) is not None]
    if len(pairs) < 2:
        return None
    marked = [d for pair in pairs if (d := pair.by_steps()) is not None]
    if marked and marked[0].rank == pairs[0].rank:
        odd = pairs[0].unusual_in_step(marked[0].seq)
        return next((d for d in marked if d.rank == odd), None)
    if seq is None:
        return None
    found = [d for pair in pairs if (d := pair.first_difference(seq, False)) is not None]
    if len(found) == 2 and found[0].seq == found[1].seq:
        at, whole = found[0].seq - pairs[0].low, found
        found = [d for pair in pairs if (d := pair.by_habit(at)) is not None and not d.either]
        if all(d.kind == "swapped" for d in whole):  # habit tells who, not what
            found = [d for d in whole if d.rank in {odd.rank for odd in found}]
    return found[0] if len(found) == 1 and not found[0].either else None


def one_of_two(job: Job, group: GroupView, one: int, two: int, seq: int) -> CallDifference | None:
    """Which of two made an extra call or skipped one, if their calls fit when moved. "One made an extra call" and "the other
    skipped one" look the same from two sides: skipped, if the other has made it before, and it was not the first that left its
    own round; else extra, the usual bug."""
    moves = (find_move(job, group, a, b, seq) for a, b in ((one, two), (two, one)))
    extras = [move for move in moves if move is not None and move.kind == "extra"]
    best = max(extras, key=lambda d: (group.lanes[d.rank].last, d.agreeing, -d.rank), default=None)
    if best is None:
        return None
    maker, avoider = group.lanes[best.rank], group.lanes[best.reference]
    made = lane_keys(job, maker)[int(np.searchsorted(maker.seqs, best.seq))]
    rows = [(job.ranks[each.rank], each.row(best.seq)) for each in (maker, avoider)]
    left = [row >= 0 and broken_habit(view, row) is not None for view, row in rows]
    own, at = lane_keys(job, avoider), int(np.searchsorted(avoider.seqs, best.seq))
    skipped = bool((own == made).any()) and left != [True, False]
    told = left == [True, False] or not skipped
    if left == [False, True]:  # a call that it never made before may be the end of its loop
        told = bool((own[:at] == own[at]).any())
    guilty, innocent = (avoider.rank, maker.rank) if skipped else (maker.rank, avoider.rank)
    found = replace(best, ranks=(guilty,), reference=innocent, kind="skipped" if skipped else "extra")
    return replace(found, either=not told, confidence=0.8 if told else 0.55)


def find_shift(job: Job, group: GroupView) -> CallDifference | None:
    """The first rank whose calls leave those of the majority without any mismatch: one more or one fewer of the same kind and
    size, visible only in the stacks."""
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    low, high = max((lane.first for lane in lanes), default=0), min((lane.last for lane in lanes), default=-1)
    ends = {lane.rank: np.searchsorted(lane.seqs, [low, high + 1]) for lane in lanes if high >= low}
    if len(ends) < 2 or any(end - start != high - low + 1 for start, end in ends.values()):
        return None
    windows = {lane.rank: lane_keys(job, lane)[slice(*ends[lane.rank])] for lane in lanes}
    prints = {rank: window.tobytes() for rank, window in windows.items()}
    common, votes = Counter(prints.values()).most_common(1)[0]
    odd = sorted(rank for rank, text in prints.items() if text != common)
    if not odd or (votes <= len(lanes) // 2 and len(lanes) > 2) or len(odd) > ASKED_RANKS:
        return None
    usual = max((lane for lane in lanes if prints[lane.rank] == common), key=lambda lane: lane.last).rank
    first = {rank: low + int(np.flatnonzero(windows[rank] != windows[usual])[0]) for rank in odd}
    found = (_shift_of(job, group, rank, usual, first[rank], len(lanes) == 2) for rank in odd)
    shifts = [shift for shift in found if shift is not None]
    return max(shifts, key=lambda shift: (shift.kind == "extra", shift.agreeing, -shift.rank), default=None)


def _shift_of(
    job: Job, group: GroupView, rank: int, usual: int, seq: int, two: bool
) -> CallDifference | None:
    """How the rank left the program of the usual one at `seq`; of `two` either may have."""
    if _is_inserted(job.ranks[rank], group.lanes[rank].row(seq)):
        return CallDifference((rank,), "extra", 0.8, say("inserted", rank=rank), usual, seq, agreeing=1)
    if not two:
        return find_move(job, group, rank, usual, seq)
    found = odd_one(job, group, rank, usual, seq) or one_of_two(job, group, rank, usual, seq)
    # A program that alternates between two lines looks swapped at its end: that alone is not evidence.
    return found if found is not None and found.kind != "swapped" else None
