"""Where one rank's program leaves the others': the first call that differs, whether it was skipped, added or swapped, and
that as a finding.

Sequence numbers count calls, not what a program meant: a rank that skips an all_reduce meets the others' with its next one,
and the numbers disagree much later. So calls are compared by what they are (operation, sizes, line), by the training step
they were made in, and by what has always come next at this point. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnose.call_sequences import (
    CONTEXT,
    MAX_CALLS,
    CallPair,
    Divergence,
    Kind,
    differences,
    usual_next,
)
from allranks.diagnose.cells import Mismatch
from allranks.diagnose.context import Context
from allranks.diagnose.job import GroupView, Job
from allranks.diagnose.phrasing import count as count_of
from allranks.diagnose.phrasing import place, ranks_text, ranks_wait, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding

#: One line of a program makes so many calls at most.
MAX_BLOCK = 256
#: So many differences between two whole programs are looked at.
MAX_DIFFERENCES = 64


def find_divergence(
    job: Job, group: GroupView, rank: int, reference: int, seq: int | None = None, outvoted: bool = True
) -> Divergence | None:
    """Where `rank` left the program of `reference`. `seq`: the call whose mismatch is to be explained, if there is one.
    `outvoted`: most ranks do as the reference does."""
    pair = CallPair.of(job, group, rank, reference)
    return diverged(pair, seq, outvoted) if pair is not None else None


def diverged(pair: CallPair, seq: int | None, outvoted: bool = True) -> Divergence | None:
    """As `find_divergence`, of calls already paired."""
    found = by_steps(pair)
    if found is not None or seq is None:
        return found
    at = seq - pair.low
    if not 0 <= at < min(len(pair.mine), len(pair.theirs)) or pair.mine[at] == pair.theirs[at]:
        return None
    swapped = _swapped(pair, at)
    if swapped is not None and min(len(pair.mine), len(pair.theirs)) - at - swapped.count > 2:
        return swapped  # and the calls behind it fit where they are
    return _moved(pair, at) or swapped or by_habit(pair, _apart_since(pair, at), outvoted)


def find_move(job: Job, group: GroupView, rank: int, reference: int, seq: int) -> Divergence | None:
    """Whether the two, who differ at `seq`, agree from some call on when one is moved. At one and the same line they do not:
    the call is the right one with the wrong arguments."""
    pair = CallPair.of(job, group, rank, reference)
    if pair is None or pair.on_one_line(seq - pair.low):
        return None
    return _moved(pair, seq - pair.low) or _moved(pair, seq - pair.low, weak=True)


def find_skip_over_groups(job: Job, group: GroupView, rank: int, waiter: int) -> Divergence | None:
    """A call of the group that `rank` left out between calls of other groups: sequence numbers hide it until the end, if all
    calls of the group look alike."""
    pair = CallPair.over_groups(job, group, rank, waiter)
    if pair is None:
        return None
    view = job.ranks[waiter]
    for at in np.flatnonzero(differences(pair.mine, pair.theirs))[:MAX_DIFFERENCES].tolist():
        found, row = by_habit(pair, at), pair.low + at  # of `over_groups`, `low` is the waiter's first row
        if found is None or found.kind != "skipped" or int(view.group[row]) != group.index:
            continue
        behind = slice(at, at + CONTEXT), slice(at + found.count, at + found.count + CONTEXT)
        if not differences(pair.mine[behind[0]], pair.theirs[behind[1]]).any():
            return replace(found, seq=int(view.trace.calls["seq"][row]))
    return None


def odd_one(job: Job, group: GroupView, one: int, two: int, seq: int | None = None) -> Divergence | None:
    """Of two ranks that differ, where the one that left its own round left it; None when nothing tells which."""
    pairs = [pair for a, b in ((one, two), (two, one)) if (pair := CallPair.of(job, group, a, b)) is not None]
    if len(pairs) < 2:
        return None
    marked = _known([by_steps(pair) for pair in pairs])
    if marked and marked[0].rank == pairs[0].rank:
        odd = unusual_in_step(pairs[0], marked[0].seq)
        return next((d for d in marked if d.rank == odd), None)
    return _odd_at(pairs, seq) if seq is not None else None


def _odd_at(pairs: list[CallPair], seq: int) -> Divergence | None:
    """As `odd_one`, of calls that differ at `seq`."""
    found = _known([diverged(pair, seq, False) for pair in pairs])
    if len(found) == 2 and found[0].seq == found[1].seq:
        at, whole = found[0].seq - pairs[0].low, found
        found = [d for d in _known([by_habit(pair, at) for pair in pairs]) if not d.either]
        if all(d.kind == "swapped" for d in whole):  # habit tells who, not what
            found = [d for d in whole if d.rank in {odd.rank for odd in found}]
    return found[0] if len(found) == 1 and not found[0].either else None


def _known(found: list[Divergence | None]) -> list[Divergence]:
    return [divergence for divergence in found if divergence is not None]


def by_steps(pair: CallPair) -> Divergence | None:
    """From some call on the two are in different training steps, and never again in the same."""
    length = min(len(pair.mine), len(pair.theirs))
    ahead = pair.my_steps[:length] - pair.their_steps[:length]
    apart = np.flatnonzero((ahead != 0) | differences(pair.mine, pair.theirs))
    at = length - len(apart)
    if not len(apart) or at == 0 or apart[0] != at or ahead[at] == 0 or (ahead[at:] * ahead[at] < 0).any():
        return None
    if min(pair.my_steps[at:length].min(), pair.their_steps[at:length].min()) < 0:
        return None
    skips = bool(ahead[at] > 0)
    step = int(pair.their_steps[at] if skips else pair.my_steps[at])
    made = int((pair.my_steps == step).sum()), int((pair.their_steps == step).sum())
    count = max(1, min(MAX_CALLS, abs(made[1] - made[0])))
    word: Kind = "skipped" if skips else "extra"
    reason = (
        f"step marks: rank {pair.rank} entered #{pair.low + at} in step {int(pair.my_steps[at])}, rank {pair.reference} in step "
        f"{int(pair.their_steps[at])}; in step {step} rank {pair.rank} made {count_of(made[0], 'call')} of the group, rank {pair.reference} {made[1]}"
    )
    return Divergence(pair.rank, pair.reference, pair.low + at, word, count, 0.93, reason)


def unusual_in_step(pair: CallPair, seq: int) -> int | None:
    """Which of the two made, in the step of the divergence, another number of calls than in its steps before; if both did,
    the one that made none at all, as it never had before."""
    step = min(int(pair.my_steps[seq - pair.low]), int(pair.their_steps[seq - pair.low]))
    odd, none = [], []
    for rank, steps in ((pair.rank, pair.my_steps), (pair.reference, pair.their_steps)):
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


def _apart_since(pair: CallPair, at: int) -> int:
    """Where the calls began to differ on the way to `at`: they may have fitted by chance since."""
    same = np.flatnonzero(pair.mine[:at] == pair.theirs[:at])
    return int(same[-1]) + 1 if len(same) else 0


def _swapped(pair: CallPair, at: int) -> Divergence | None:
    """Both made both calls, in different order, and what lies behind fits where it is."""
    mine, theirs = pair.mine[at : at + MAX_CALLS + 1], pair.theirs[at : at + MAX_CALLS + 1]
    later, earlier = np.flatnonzero(mine == theirs[0]), np.flatnonzero(theirs == mine[0])
    if not len(later) or not len(earlier):
        return None
    length = max(int(later[0]), int(earlier[0])) + 1
    same = sorted(mine[:length].tolist()) == sorted(theirs[:length].tolist())
    if not same or differences(pair.mine[at + length :], pair.theirs[at + length :]).any():
        return None
    last = pair.low + at + int(later[0])
    reason = f"rank {pair.rank} made the calls #{pair.low + at} and #{last} in the other order than rank {pair.reference}"
    return Divergence(pair.rank, pair.reference, pair.low + at, "swapped", int(later[0]), 0.9, reason)


def _moved(pair: CallPair, at: int, weak: bool = False) -> Divergence | None:
    """The two fit again when one is moved from some call before `at` on; in place they have differed since. `weak`: one call
    that fits is enough, if one of the two made as many calls more."""
    kinds: tuple[Kind, ...] = ("skipped", "extra")
    moves = (_move(pair, at, count, kind, weak) for count in range(1, MAX_CALLS + 1) for kind in kinds)
    found = [move for move in moves if move is not None]
    return max(found, key=lambda move: move[:3])[3] if found else None


def _move(
    pair: CallPair, at: int, count: int, kind: Kind, weak: bool
) -> tuple[int, bool, int, Divergence] | None:
    """(how many calls fit better, whether the numbers of calls agree with it, fewest moved first, the divergence)."""
    differs = differences(pair.mine, pair.theirs)
    mine, theirs = (pair.mine, pair.theirs[count:]) if kind == "skipped" else (pair.mine[count:], pair.theirs)
    moved = differences(mine, theirs)
    length = min(len(differs), len(moved))
    if length < 1:
        return None
    # Differences in place before d, and moved behind it, for every d; the last of equal ones is the certain one.
    behind = np.append(np.cumsum(moved[::-1])[::-1], 0)[: length + 1]
    total = np.append(0, np.cumsum(differs[:length])) + behind
    d = int(length - np.argmin(total[::-1]))
    agreeing, gain = len(moved) - d, int(differs.sum()) - int(total[d])
    more = len(pair.mine) - len(pair.theirs)
    counted = more == (count if kind == "extra" else -count)
    fitting = min(agreeing, gain)
    enough = (counted and fitting > 0) if weak else (d > 0 and fitting > 1)
    if d > at or not differs[d] or not enough:
        return None
    if not more and not differs[d + count :].any():
        return None  # what lies behind fits where it is: a call was changed, none added or left out
    reason = (
        f"moved by {count}, its next {agreeing} calls are at the same lines as those of rank {pair.reference}"
    )
    sure = min(0.95, 0.8 + 0.03 * agreeing)
    found = Divergence(pair.rank, pair.reference, pair.low + d, kind, count, sure, reason, agreeing=agreeing)
    # A program that alternates fits both ways: then who made more calls has the extra one.
    return gain, counted, -count, found


def _in_usual_step(pair: CallPair, at: int, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Whether the rank's step marks went on from its last call as they did when the calls in between were made."""
    steps = pair.their_steps
    usual = steps[ends] - steps[starts - 1]
    return bool((usual == pair.my_steps[at] - pair.my_steps[at - 1]).any())


def by_habit(pair: CallPair, at: int, outvoted: bool = False) -> Divergence | None:
    """What has always come next at this point tells who left the round, and how."""
    known, usual = pair.theirs[:at], usual_next(pair.theirs, at)
    if not len(usual):
        return None
    expected, seq, me, them = known[usual], pair.low + at, pair.mine[at], pair.theirs[at]
    made_mine, made_theirs = bool((known == me).any()), bool((known == them).any())
    if pair.one_line[at] and not (made_mine and made_theirs):
        return None  # the right call with the wrong arguments
    if bool((expected == me).all()) and not made_theirs:
        reason = f"rank {pair.rank} went on as in all rounds before, rank {pair.reference} did not"
        return Divergence(pair.rank, pair.reference, seq, "extra", 1, 0.75, reason, True)
    if bool((expected == them).all()):
        left_out = _skipped_line(pair, at, usual) or _skipped(pair, at, usual, True)
        left_out = left_out or _rest_of_round(pair, at, usual) or _left_loop(pair, at)
        return left_out or _added(pair, at, len(usual), True, made_mine)
    return (
        _in_some_rounds(pair, at, usual, made_mine) if outvoted and bool((expected == them).any()) else None
    )


def _in_some_rounds(pair: CallPair, at: int, usual: np.ndarray, made: bool) -> Divergence:
    """Rounds with and without these calls: the two took different branches, or a loop was longer."""
    again = pair.mine[at] == pair.mine[at - 1]
    skipped = _skipped(pair, at, usual if again else usual[pair.theirs[usual] == pair.theirs[at]], False)
    if skipped is not None and skipped.kind == "skipped":
        return skipped
    return _added(pair, at, len(usual), False, made and not again)


def _added(pair: CallPair, at: int, rounds: int, always: bool, known: bool) -> Divergence:
    """The rank made a call more; `known`: one that it has made before."""
    inserted = at + 1 < len(pair.mine) and bool(pair.mine[at + 1] == pair.theirs[at])
    often = "in all rounds before" if always else "in rounds before"
    reason = f"{often}, rank {pair.rank} made here the call that the others make"
    sure = 0.85 if always and rounds > 1 else 0.7
    either = not inserted and not known
    return Divergence(pair.rank, pair.reference, pair.low + at, "extra", 1, sure, reason, either)


def _skipped(pair: CallPair, at: int, usual: np.ndarray, always: bool) -> Divergence | None:
    """The rank is in the call that has always come behind those which the others make now: it left these out."""
    known, me = pair.theirs[:at], pair.mine[at]
    often = "in all rounds before" if always else "in rounds before"
    for count in range(1, MAX_CALLS + 1):
        starts = usual[usual + count < at]
        ends, between = starts + count, pair.theirs[usual[0] : usual[0] + count]
        alike = len(ends) > 0 and bool((known[ends] == me).all()) and not bool((between == me).any())
        # Several calls left out before a rare one: rather was the rare one added.
        likely = count == 1 or int((known == me).sum()) >= int((known == pair.theirs[at]).sum())
        if not alike or not _in_usual_step(pair, at, starts, ends):
            continue
        if likely:
            reason = f"{often}, rank {pair.rank} made the call too, and then the one that it went on to"
            sure = 0.7 if not always else 0.9 if len(ends) > 1 else 0.85
            return Divergence(pair.rank, pair.reference, pair.low + at, "skipped", count, sure, reason)
        reason = f"{often}, rank {pair.rank} made {count_of(count, 'call')} more before the one it is in now"
        return Divergence(pair.rank, pair.reference, pair.low + at, "extra", 1, 0.7, reason, True)
    return None


def _rest_of_round(pair: CallPair, at: int, usual: np.ndarray) -> Divergence | None:
    """The rank left out many calls of several lines, and is in one that has come behind them in all rounds, as often."""
    me, known = pair.mine[at], pair.theirs[:at]
    behind = np.flatnonzero(known == me)
    found = np.searchsorted(behind, usual)
    if len(usual) < 2 or int(found[-1]) >= len(behind) or len(behind) < int((known == pair.theirs[at]).sum()):
        return None
    counts = behind[found] - usual
    count = int(counts[0])
    if not MAX_CALLS < count <= MAX_BLOCK or bool((counts != count).any()):
        return None
    if not _in_usual_step(pair, at, usual, behind[found]):
        return None
    reason = f"in all rounds before, rank {pair.rank} made {count_of(count, 'call')} more before the one it is in now"
    return Divergence(pair.rank, pair.reference, pair.low + at, "skipped", count, 0.8, reason)


def _left_loop(pair: CallPair, at: int) -> Divergence | None:
    """The others repeat a call; the rank has stopped repeating it and is in one of the program that it made before, more often."""
    me, known, them = pair.mine[at], pair.theirs[:at], pair.theirs[at]
    more_often = int((known == me).sum()) >= int((known == them).sum())
    if (
        not more_often
        or at < 2
        or not bool((known[-2:] == them).all())
        or pair.my_steps[at] != pair.their_steps[at]
    ):
        return None
    reason = f"rank {pair.rank} made one call fewer of those that the others repeat, and is in one that it made before them"
    return Divergence(pair.rank, pair.reference, pair.low + at, "skipped", 1, 0.7, reason)


def _skipped_line(pair: CallPair, at: int, usual: np.ndarray) -> Divergence | None:
    """The rank left out one line of its program, with all its calls, and is at the next."""
    me, known, lines = pair.mine[at], pair.theirs[:at], pair.their_lines
    for count in range(2, MAX_BLOCK + 1):
        ends = usual + count
        if int(ends[-1]) >= at:
            return None
        if bool((known[ends] == me).any()):
            break
    start, line = int(usual[-1]), lines[int(usual[-1])]
    alone = line and line != lines[start - 1] and bool((lines[start : start + count] == line).all())
    if count == MAX_BLOCK or not alone or not bool((known[ends] == me).all()) or lines[start + count] == line:
        return None
    reason = f"in all rounds before, rank {pair.rank} made here {count_of(count, 'call')} of one line and then the one it is in"
    return Divergence(pair.rank, pair.reference, pair.low + at, "skipped", count, 0.8, reason)


#: As sure as this at most where the files of other ranks might tell otherwise.
TURNABLE = 0.6
CAUSES = {"skipped": "missing_rank", "extra": "extra_collective", "swapped": "order_inversion"}


@dataclass(frozen=True)
class DivergenceStory:
    """The finding about ranks that left the program of the others; `mismatch` or `blocked` is what came of it."""

    context: Context
    group: GroupView
    divergence: Divergence
    ranks: tuple[int, ...]  # all that left the program there
    mismatch: Mismatch | None = None
    blocked: Blocked | None = None

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks that made a call of this number and are not guilty."""
        lanes = self.group.lanes.items()
        return tuple(r for r, lane in lanes if r not in self.ranks and lane.row(self.divergence.seq) >= 0)

    def finding(self) -> Finding:
        context, seq = self.context, self.divergence.seq
        maker = self.divergence.reference if self.divergence.kind == "skipped" else self.divergence.rank
        at = place(context.job.frames(maker, self.group.lanes[maker].row(seq)))
        rows = {rank: self.group.lanes[rank].row(seq) for rank in (*self.ranks, *self.others)}
        guilty = [(rank, rows[rank]) for rank in self.ranks if rows[rank] >= 0]
        return Finding(
            CAUSES[self.divergence.kind],
            self.ranks,
            self._sentence(maker, at) + self._now(),
            "root",
            self.group.label,
            seq,
            self._sure(),
            at,
            context.waiting_but(self.ranks),
            context.waited_in(self.group),
            (*context.stacks(guilty), *context.stacks((rank, rows[rank]) for rank in self.others)),
            self._evidence(),
            advice=(_advice(self.divergence, at),),
            met_another=self.mismatch is not None,
        )

    def _sure(self) -> float:
        """The confidence; lower where ranks without a file might turn the majority."""
        absent = len(self.group.members) - len(self.group.lanes)
        turned = absent and len(self.others) - len(self.ranks) < absent
        return min(TURNABLE, self.divergence.confidence) if turned else self.divergence.confidence

    def _sentence(self, maker: int, at: str) -> str:
        found, subject = self.divergence, who(self.context.job, self.ranks)
        if found.kind == "swapped":
            return self._swapped()
        op = self.context.job.op(maker, self.group.lanes[maker].row(found.seq))
        call = f"{op} #{found.seq} of group {self.group.label}{f' at {at}' if at else ''}"
        call += f" and {count_of(found.count - 1, 'call')} behind it" if found.count > 1 else ""
        if found.kind == "skipped":
            makers = ranks_text(self.others) if self.others else "the others"
            return f"{subject} skipped {call}, which {makers} made, and went on"
        either = " (an extra call, or one of them has left its loop early)" if found.either else ""
        return f"{subject} made an extra {call}, where {self._called()}{either}"

    def _evidence(self) -> tuple[str, ...]:
        mismatch = self.mismatch
        if mismatch is None:
            return (self.divergence.reason,)
        if mismatch.seq == self.divergence.seq:
            each = (f"{ranks_text(those)}: {text}" for text, those in mismatch.classes[:6])
            return (self.divergence.reason, *each)
        sides = " against ".join(f"{text} on {ranks_text(those)}" for text, those in mismatch.classes[:3])
        return (self.divergence.reason, f"their calls fitted by chance until #{mismatch.seq}: {sides}")

    def _called(self) -> str:
        """ "ranks 1, 2 called all_reduce at train.py:9", the largest party of them."""
        parties: dict[str, list[int]] = {}
        for rank in self.others:
            row = self.group.lanes[rank].row(self.divergence.seq)
            at = place(self.context.job.frames(rank, row))
            text = f"{self.context.job.op(rank, row)}{f' at {at}' if at else ''}"
            parties.setdefault(text, []).append(rank)
        if not parties:
            return "the others do not make it"
        text, those = max(parties.items(), key=lambda item: (len(item[1]), -min(item[1])))
        return f"{ranks_text(those)} called {text}"

    def _swapped(self) -> str:
        """Two calls of one group in another order; which threads made them, where that differs."""
        job, rank, seq = self.context.job, self.divergence.rank, self.divergence.seq
        trace, last = job.ranks[rank].trace, seq + self.divergence.count
        rows = [self.group.lanes[rank].row(number) for number in (seq, last)]
        texts = [
            f"{job.op(rank, row)}{f' at {at}' if (at := place(job.frames(rank, row))) else ''}"
            for row in rows
        ]
        text = (
            f"{who(job, self.ranks)} made {texts[0]} (#{seq}) before {texts[1]} (#{last}) of group {self.group.label}, "
            f"{ranks_text(self.others)} the other way round"
        )
        threads = [int(trace.calls["thread"][row]) for row in rows]
        if threads[0] == threads[1]:
            return text
        names = [trace.threads[thread] for thread in threads if trace.threads.get(thread)]
        named = f" ({' and '.join(names)})" if len(names) == 2 else ""
        return f"{text}: two threads{named} use one group, and nothing orders their calls"

    def _now(self) -> str:
        """Where the hang shows, if that is later than where it began."""
        mismatch, blocked, found = self.mismatch, self.blocked, self.divergence
        if mismatch is not None and mismatch.seq > found.seq:
            mine = next((text for text, those in mismatch.classes if found.rank in those), "")
            theirs = next((text for text, those in mismatch.classes if found.reference in those), "")
            if mine and theirs and mismatch.cause == "type_mismatch":
                return f"; at #{mismatch.seq} it called {mine} where they called {theirs}"
            return f"; at #{mismatch.seq} their calls no longer fit"
        if blocked is not None and (blocked.seq > found.seq or blocked.group != self.group.index):
            failure = self.context.failure(blocked)
            if failure:
                return f"; {failure.replace('the call', self.context.call(blocked))}"
            return f"; now {ranks_wait(blocked.waiters)} in {self.context.call(blocked)}"
        return ""


def left_program(
    context: Context, group: GroupView, divergence: Divergence, blocked: Blocked | None = None
) -> Finding:
    """The finding about one rank; `blocked` is the call in which others wait since."""
    return DivergenceStory(context, group, divergence, (divergence.rank,), None, blocked).finding()


def _advice(divergence: Divergence, at: str) -> str:
    line = at or "that line"
    if divergence.kind == "swapped":
        return f"make these calls in one order on all ranks; a thread beside the training loop needs a group of its own ({line})"
    if divergence.kind == "skipped":
        return f"look for a condition, exception or early end of a loop that lets rank {divergence.rank} pass {line}"
    return (
        f"make the call on all ranks of the group, or on none: look for a condition on the rank around {line}"
    )
