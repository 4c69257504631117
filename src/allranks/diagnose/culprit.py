"""Who is the odd one when calls do not fit: by majority, else by what the ranks themselves did before. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnose.call_sequences import Divergence, breaks_habit, common_calls, is_inserted, of_two
from allranks.diagnose.cells import Mismatch
from allranks.diagnose.divergence import find_divergence, find_move, odd_one
from allranks.diagnose.job import GroupView, Job
from allranks.diagnose.phrasing import count_ranks

#: Other ranks asked what they do at the same line.
ASKED_RANKS = 64


@dataclass(frozen=True)
class Culprit:
    """The guilty ranks, how sure we are, and the reason as a sentence."""

    ranks: tuple[int, ...]
    confidence: float
    reason: str
    divergence: Divergence | None = None


@dataclass(frozen=True)
class _Case:
    """A mismatch, and what is known of who differs. `odd`: the ranks outside the majority; None: there is none."""

    job: Job
    group: GroupView
    mismatch: Mismatch
    odd: tuple[int, ...] | None
    divergence: Divergence | None


def judge(job: Job, mismatch: Mismatch) -> Culprit:
    """Names the odd ranks of a mismatch. Ties are broken by shift, own history, other groups, and who was aborted."""
    group, exchange = job.groups[mismatch.group], mismatch.exchange
    odd = (
        mismatch.minority() if exchange is None else exchange.suspects if exchange.confidence > 0.5 else None
    )
    divergence = _divergence(job, group, mismatch, odd) if not mismatch.part and exchange is None else None
    case = _Case(job, group, mismatch, odd, divergence)
    for rule in _RULES:
        culprit = rule(case)
        if culprit is not None:
            # Without a majority a file that is missing might have told otherwise.
            doubt = 0.8 if odd is None and len(group.lanes) < len(group.members) else 1.0
            return replace(culprit, confidence=round(culprit.confidence * doubt, 2))
    everyone = tuple(sorted(rank for _, ranks in mismatch.classes for rank in ranks))
    return Culprit(everyone, 0.5, "there is no majority and no history to tell who is the odd one")


def _divergence(
    job: Job, group: GroupView, mismatch: Mismatch, odd: tuple[int, ...] | None
) -> Divergence | None:
    """Where the odd rank left the program of the majority; of two that differ, where the one that left its own round did."""
    if odd is not None:
        reference = mismatch.classes[0][1][0]
        # Step marks may show that it was the majority that skipped a step.
        marked = odd_one(job, group, odd[0], reference)
        return marked or find_divergence(job, group, odd[0], reference, mismatch.seq)
    if len(mismatch.classes) != 2:
        return None
    return odd_one(job, group, mismatch.classes[0][1][0], mismatch.classes[1][1][0], mismatch.seq)


def _diverged(case: _Case) -> Culprit | None:
    """All ranks that left the program of the others at one call and in the same way."""
    found, mismatch = case.divergence, case.mismatch
    if found is None or (found.either and mismatch.cause == "type_mismatch"):
        return None
    if found.kind == "extra" and _is_of_another_group(case, found):
        return None
    candidates = case.odd or ()
    if found.rank not in candidates:
        candidates = next(ranks for _, ranks in mismatch.classes if found.rank in ranks)
    same = [found.rank]
    for rank in candidates[:ASKED_RANKS]:
        other = find_divergence(case.job, case.group, rank, found.reference, mismatch.seq)
        if rank != found.rank and other is not None and other.kind == found.kind:
            same.append(rank)
    return Culprit(tuple(sorted(same)), found.confidence, found.reason, found)


def _is_of_another_group(case: _Case, found: Divergence) -> bool:
    """Whether the rank has made the call at this line before, but in another group: it is not one more, but went astray."""
    view, row = case.job.ranks[found.rank], case.group.lanes[found.rank].row(found.seq)
    same_line = view.group[:row][view.stack[:row] == view.stack[row]]
    return bool(view.stack[row]) and bool((same_line != case.group.index).any())


def _moved(case: _Case) -> Culprit | None:
    """A rank whose calls fit those of the others when moved. Inside a batch the group's numbers say nothing of that, and
    splits differ between ranks as they may."""
    classes, seq = case.mismatch.classes, case.mismatch.seq
    if case.mismatch.part or case.mismatch.exchange is not None or (case.odd is None and len(classes) != 2):
        return None
    one, two = (case.odd or classes[1][1])[0], classes[0][1][0]
    if case.odd is not None:
        moves = {r: find_move(case.job, case.group, r, two, seq) for r in case.odd[:ASKED_RANKS]}
        found = moves[one]
        ranks = tuple(rank for rank, move in moves.items() if move and found and move.kind == found.kind)
        return Culprit(ranks, 0.93, found.reason, replace(found, confidence=0.93)) if found else None
    found = _one_of_two(case.job, case.group, one, two, seq)
    if found is None:
        return None
    ranks = next(ranks for _, ranks in classes if found.rank in ranks)
    return Culprit(ranks, found.confidence, found.reason, found)


def _one_of_two(job: Job, group: GroupView, one: int, two: int, seq: int) -> Divergence | None:
    """Which of two made an extra call or skipped one, if their calls fit when moved."""
    moves = (find_move(job, group, a, b, seq) for a, b in ((one, two), (two, one)))
    extras = [move for move in moves if move is not None and move.kind == "extra"]
    # "One made an extra call" and "the other skipped one" look the same from two sides; the first is the usual bug.
    best = max(extras, key=lambda d: (group.lanes[d.rank].last, d.agreeing, -d.rank), default=None)
    if best is None:
        return None
    return of_two(job, best, group.lanes[best.rank], group.lanes[best.reference])


def _exchanged(case: _Case) -> Culprit | None:
    """The ranks whose splits disagree; the one that changed its own, where nothing else tells."""
    exchange = case.mismatch.exchange
    if exchange is None:
        return None
    own = _own_history(case) if case.odd is None else None
    if own is not None and set(own.ranks) < set(exchange.suspects):
        return own
    return Culprit(exchange.suspects, exchange.confidence, exchange.reason)


def _outvoted(case: _Case) -> Culprit | None:
    if case.odd is None:
        return None
    total = sum(len(ranks) for _, ranks in case.mismatch.classes)
    reason = f"{total - len(case.odd)} of {total} ranks agree"
    if case.divergence is not None:
        reason += f"; {case.divergence.reason}: a call of one side only, or the end of a loop that came too early or too late"
    agree, absent = total - len(case.odd), len(case.group.members) - len(case.group.lanes)
    if agree - len(case.mismatch.classes[1][1]) <= absent:
        reason += f"; {count_ranks(absent)} left no file and might turn the majority"
        return Culprit(case.odd, 0.55, reason)
    return Culprit(case.odd, 0.95 if agree > 2 else 0.9, reason)


def _own_history(case: _Case) -> Culprit | None:
    """A rank that did something else at this line before is the odd one, if the others stayed the same."""
    changed: list[tuple[int, ...]] = []
    steady = 0
    for _, ranks in case.mismatch.classes:
        verdicts = [_changed(case.job, case.group, rank, case.mismatch.seq) for rank in ranks[:ASKED_RANKS]]
        if any(verdict is True for verdict in verdicts):
            changed.append(ranks)
        elif any(verdict is False for verdict in verdicts):
            steady += 1
    if len(changed) == 1 and steady:
        return Culprit(changed[0], 0.85, "at the same line it did what the others did until then")
    return None


def _left_round(case: _Case) -> Culprit | None:
    """A rank that, at this point of its earlier rounds, always made another call, perhaps in another group."""
    odd = [
        ranks
        for _, ranks in case.mismatch.classes
        if breaks_habit(case.job.ranks[ranks[0]], case.group.lanes[ranks[0]].row(case.mismatch.seq))
    ]
    if len(odd) != 1:
        return None
    reason = "in all its rounds before it made another call at this point, the others did not"
    rank, seq = odd[0][0], case.mismatch.seq
    other = next(ranks[0] for _, ranks in case.mismatch.classes if rank not in ranks)
    view, row = case.job.ranks[rank], case.group.lanes[rank].row(seq)
    mine = int(view.stack[row])
    theirs = int(case.job.ranks[other].stack[case.group.lanes[other].row(seq)])
    fixed = case.mismatch.part or case.mismatch.cause == "type_mismatch"
    if fixed or not mine or not theirs or mine == theirs:
        return Culprit(odd[0], 0.7, reason)
    # Not one call with other arguments, but one of another line.
    astray = Divergence(rank, other, seq, "extra", 1, 0.7, reason, True)
    groups = view.group[:row][view.stack[:row] == mine]
    if not len(groups):
        return Culprit(odd[0], 0.7, reason, astray)
    own = bool((groups == case.group.index).all())  # else it is the right call in the wrong group
    known = find_divergence(case.job, case.group, rank, other, seq, outvoted=False) if own else None
    return Culprit(odd[0], 0.7, reason, known)


def _changed(job: Job, group: GroupView, rank: int, seq: int) -> bool | None:
    """Whether the rank's call differs from its previous one at the same line; None when there was none."""
    lane, view = group.lanes[rank], job.ranks[rank]
    row = lane.row(seq)
    before = lane.rows[: int(np.searchsorted(lane.seqs, seq))]
    same_line = before[view.stack[before] == view.stack[row]] if len(before) else before
    if not len(same_line):
        return None
    return bool(view.sig[same_line[-1]] != view.sig[row])


def _other_groups(case: _Case) -> Culprit | None:
    """What ranks outside the group did at the same line decides between the classes."""
    job, group, mismatch = case.job, case.group, case.mismatch
    outside = [rank for rank in job.ranks if rank not in group.lanes][:ASKED_RANKS]
    votes = [0] * len(mismatch.classes)
    for index, (_, ranks) in enumerate(mismatch.classes):
        view, row = job.ranks[ranks[0]], group.lanes[ranks[0]].row(mismatch.seq)
        if view.stack[row] == 0:
            return None
        for rank in outside:
            other = job.ranks[rank]
            at = np.flatnonzero(other.stack == view.stack[row])
            votes[index] += bool(len(at) and other.sig[at[-1]] == view.sig[row])
    best = max(votes)
    if best == 0 or votes.count(best) > 1:
        return None
    others = [ranks for vote, (_, ranks) in zip(votes, mismatch.classes, strict=True) if vote != best]
    guilty = tuple(sorted(rank for ranks in others for rank in ranks))
    return Culprit(guilty, 0.8, f"{best} ranks of other groups agree with the other side at the same line")


def _aborted(case: _Case) -> Culprit | None:
    """gloo aborts the rank whose buffer is too small, so a member without a dump speaks for the smaller size."""
    job, group, mismatch = case.job, case.group, case.mismatch
    absent = [rank for rank in group.members if rank not in group.lanes]
    if group.backend != "gloo" or not absent or mismatch.cause not in ("size_mismatch", "dtype_mismatch"):
        return None
    first = [ranks[0] for _, ranks in mismatch.classes]
    sizes = [job.input_bytes(rank, group.lanes[rank].row(mismatch.seq)) for rank in first]
    if sizes.count(max(sizes)) > 1:
        return None
    guilty = mismatch.classes[sizes.index(max(sizes))][1]
    return Culprit(guilty, 0.7, "gloo aborts the rank that gets more than it expects, and a rank is gone")


def find_stack_shift(job: Job, group: GroupView) -> Divergence | None:
    """An extra or skipped call of the same kind and size, visible only in the stacks."""
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    windows, low = common_calls(job, lanes)
    if len(windows) < 2:
        return None
    prints = {rank: window.tobytes() for rank, window in windows.items()}
    common, votes = Counter(prints.values()).most_common(1)[0]
    odd = sorted(rank for rank, text in prints.items() if text != common)
    if not odd or (votes <= len(lanes) // 2 and len(lanes) > 2) or len(odd) > 64:
        return None
    usual = max((lane for lane in lanes if prints[lane.rank] == common), key=lambda lane: lane.last)
    first = {rank: low + int(np.flatnonzero(windows[rank] != windows[usual.rank])[0]) for rank in odd}
    found = (_shift_of(job, group, rank, usual.rank, first[rank], len(lanes) == 2) for rank in odd)
    shifts = [shift for shift in found if shift is not None]
    return max(shifts, key=lambda shift: (shift.kind == "extra", shift.agreeing, -shift.rank), default=None)


def _shift_of(job: Job, group: GroupView, rank: int, usual: int, seq: int, two: bool) -> Divergence | None:
    """How the rank left the program of the usual one at `seq`; of `two` either may have."""
    if is_inserted(job.ranks[rank], group.lanes[rank].row(seq)):
        reason = (
            f"rank {rank} never made this call before, and right behind it the one that has always come here"
        )
        return Divergence(rank, usual, seq, "extra", 1, 0.8, reason, agreeing=1)
    if not two:
        return find_move(job, group, rank, usual, seq)
    found = odd_one(job, group, rank, usual, seq) or _one_of_two(job, group, rank, usual, seq)
    # A program that alternates between two lines looks swapped at its end: that alone is no evidence.
    return found if found is not None and found.kind != "swapped" else None


_RULES = (_diverged, _moved, _exchanged, _outvoted, _own_history, _left_round, _other_groups, _aborted)
