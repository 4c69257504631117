"""Who is the odd one when the calls of one collective do not fit: by the alignment of calls, by majority, else by what the ranks
themselves did before, by other groups, and by who was aborted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnosis.alignment import (
    ASKED_RANKS,
    CallDifference,
    CallPair,
    broken_habit,
    find_difference,
    find_move,
    is_new,
    odd_one,
    one_of_two,
)
from allranks.diagnosis.context import user_frame
from allranks.diagnosis.job import GroupView, Job
from allranks.diagnosis.kinds import say
from allranks.diagnosis.match import Mismatch
from allranks.model.formatting import count as count_of


@dataclass(frozen=True)
class _Case:
    """A mismatch, and what is known of who differs. `odd`: the ranks outside the majority; None: there is none."""

    job: Job
    group: GroupView
    mismatch: Mismatch
    odd: tuple[int, ...] | None
    difference: CallDifference | None

    def changed(self, ranks: tuple[int, ...], sure: float, reason: str) -> CallDifference:
        return CallDifference(ranks, "changed", sure, reason, seq=self.mismatch.seq)


def judge(job: Job, mismatch: Mismatch) -> CallDifference:
    """Names the odd ranks of a mismatch. Ties are broken by shift, own history, other groups, and who was aborted."""
    group, exchange = job.groups[mismatch.group], mismatch.exchange
    odd = (
        mismatch.minority() if exchange is None else exchange.suspects if exchange.confidence > 0.5 else None
    )
    found = _difference(job, group, mismatch, odd) if not mismatch.part and exchange is None else None
    case = _Case(job, group, mismatch, odd, found)
    for rule in _RULES:
        culprit = rule(case)
        if culprit is not None:
            # Without a majority a file that is missing might have told otherwise.
            doubtful = odd is None and _unseen(group, mismatch.seq) > 0
            sure = culprit.confidence * (0.8 if culprit.kind == "changed" else 0.65)
            return replace(culprit, confidence=round(sure, 2)) if doubtful else culprit
    everyone = tuple(sorted(rank for _, ranks in mismatch.classes for rank in ranks))
    return case.changed(everyone, 0.5, say("tie"))


def _unseen(group: GroupView, seq: int) -> int:
    """How many members have no file, or one that ends before this call."""
    lanes = [group.lanes.get(rank) for rank in group.members]
    return sum(lane is None or (lane.cut and lane.last < seq) for lane in lanes)


def _difference(
    job: Job, group: GroupView, mismatch: Mismatch, odd: tuple[int, ...] | None
) -> CallDifference | None:
    """Where the odd rank left the program of the majority; of two that differ, where the one that left its own round did."""
    if odd is not None:
        reference = mismatch.classes[0][1][0]
        # Step marks may show that it was the majority that skipped a step.
        marked = odd_one(job, group, odd[0], reference)
        return marked or find_difference(job, group, odd[0], reference, mismatch.seq)
    if len(mismatch.classes) != 2:
        return None
    return odd_one(job, group, mismatch.classes[0][1][0], mismatch.classes[1][1][0], mismatch.seq)


def _diverged(case: _Case) -> CallDifference | None:
    """All ranks that left the program of the others at one call and in the same way."""
    found, mismatch, group = case.difference, case.mismatch, case.group
    if found is None:
        return None
    if found.kind == "extra" and _is_within(case, found):
        found = replace(found, either=False, confidence=max(0.85, found.confidence))
    if found.kind == "extra" and _has_returned(case, found.rank, found.reference, found.seq):
        return None
    if found.either and (mismatch.cause == "type_mismatch" or _is_branch(case, found)):
        return None
    if _went_astray(case, found):
        return None
    candidates = case.odd or ()
    if found.rank not in candidates:
        candidates = next(ranks for _, ranks in mismatch.classes if found.rank in ranks)
    same = [found.rank]
    for rank in candidates[:ASKED_RANKS]:
        other = find_difference(case.job, group, rank, found.reference, mismatch.seq)
        if rank != found.rank and other is not None and other.kind == found.kind:
            same.append(rank)
    return replace(found, ranks=(found.rank, *same[1:]))


def _went_astray(case: _Case, found: CallDifference) -> bool:
    """Whether the rank has made an added call at this line before, in another group: it is not one more, but in the wrong group."""
    view, row = case.job.ranks[found.rank], case.group.lanes[found.rank].row(found.seq)
    if found.kind != "extra" or row < 0 or not view.stack[row]:
        return False
    return bool((view.group[:row][view.stack[:row] == view.stack[row]] != case.group.index).any())


def _is_within(case: _Case, found: CallDifference) -> bool:
    """Whether the rank made its call inside the very statement in which the others are, a recomputation in backward, say: then
    it has not left their loop."""
    mine, theirs = (
        case.job.frames(rank, case.group.lanes[rank].row(found.seq)) for rank in (found.rank, found.reference)
    )
    outer, own = user_frame(theirs), user_frame(mine)
    return outer is not None and own != outer and outer in mine


def _is_branch(case: _Case, found: CallDifference) -> bool:
    """Whether both are in one function, in calls that differ in the root or the reduction alone: two branches of one call."""
    frames = (case.job.frames(r, case.group.lanes[r].row(found.seq)) for r in (found.rank, found.reference))
    mine, theirs = map(user_frame, frames)
    same = mine is not None and theirs is not None and (mine.file, mine.name) == (theirs.file, theirs.name)
    return (
        same
        and found.seq == case.mismatch.seq
        and case.mismatch.cause in ("root_mismatch", "reduce_op_mismatch")
    )


def _returned(case: _Case) -> CallDifference | None:
    """Ranks that left a loop which the others are in, as their lines show."""
    classes, seq = case.mismatch.classes, case.mismatch.seq
    if case.mismatch.part or case.mismatch.exchange is not None or (case.odd is None and len(classes) != 2):
        return None
    sides = [(case.odd, classes[0][1])] if case.odd else [(c[1], d[1]) for c, d in (classes, classes[::-1])]
    for ranks, others in sides:
        if _has_returned(case, ranks[0], others[0], seq):
            same = tuple(rank for rank in ranks[:ASKED_RANKS] if _has_returned(case, rank, others[0], seq))
            reason = say("left_loop", rank=ranks[0], returned=True)
            return CallDifference(same, "skipped", 0.85 if case.odd else 0.7, reason, others[0], seq)
    return None


def _has_returned(case: _Case, rank: int, reference: int, seq: int) -> bool:
    """Whether the reference repeats a call inside a function, of a generation, say, that this rank has made too and then
    returned from: it made fewer rounds of that loop."""
    lanes, job = case.group.lanes, case.job
    rows = {each: lanes[each].row(seq) for each in (rank, reference)}
    before = [lanes[each].row(seq - 1) for each in rows]
    if min(*rows.values(), *before) < 0:
        return False
    theirs = int(job.ranks[reference].stack[rows[reference]])
    if any(int(job.ranks[each].stack[row]) != theirs for each, row in zip(rows, before, strict=True)):
        return False  # it was not in that loop
    mine, inner = (job.frames(each, row) for each, row in rows.items())
    own, loop = user_frame(mine), user_frame(inner)
    if own is None or loop is None or (own.file, own.name) == (loop.file, loop.name):
        return False
    called_from = [f for f in inner if (f.file, f.name) == (own.file, own.name) and f != own]
    return bool(called_from) and called_from[0].line < own.line


def _moved(case: _Case) -> CallDifference | None:
    """A rank whose calls fit those of the others when moved. Inside a batch the group's numbers say nothing of that, and
    splits differ between ranks as they may."""
    classes, seq = case.mismatch.classes, case.mismatch.seq
    if case.mismatch.part or case.mismatch.exchange is not None or (case.odd is None and len(classes) != 2):
        return None
    one, two = (case.odd or classes[1][1])[0], classes[0][1][0]
    if case.odd is not None:
        moves = {r: find_move(case.job, case.group, r, two, seq) for r in case.odd[:ASKED_RANKS]}
        found = moves[one]
        if found is None or _went_astray(case, found):
            return None
        return replace(
            found, ranks=tuple(r for r, m in moves.items() if m and m.kind == found.kind), confidence=0.93
        )
    found = one_of_two(case.job, case.group, one, two, seq)
    if found is None or _went_astray(case, found):
        return None
    ranks = next(ranks for _, ranks in classes if found.rank in ranks)
    return replace(found, ranks=(found.rank, *(rank for rank in ranks if rank != found.rank)))


def _exchanged(case: _Case) -> CallDifference | None:
    """The ranks whose splits disagree; the one that changed its own, where nothing else tells."""
    exchange = case.mismatch.exchange
    if exchange is None:
        return None
    own = _own_history(case) if case.odd is None else None
    if own is not None and set(own.ranks) < set(exchange.suspects):
        return own
    return case.changed(exchange.suspects, exchange.confidence, exchange.reason)


def _outvoted(case: _Case) -> CallDifference | None:
    if case.odd is None:
        return None
    total = sum(len(ranks) for _, ranks in case.mismatch.classes)
    agree, absent = total - len(case.odd), _unseen(case.group, case.mismatch.seq)
    turned = agree - len(case.mismatch.classes[1][1]) <= absent
    reason, lost = (
        case.difference.reason if case.difference else "",
        count_of(absent, "rank") if turned else "",
    )
    reason = say("outvoted", agree=agree, total=total, reason=reason, absent=lost)
    return case.changed(case.odd, 0.55 if turned else 0.95 if agree > 2 else 0.9, reason)


def _own_history(case: _Case) -> CallDifference | None:
    """A rank that did something else at this line before is the odd one, if the others stayed the same."""
    changed: list[tuple[int, ...]] = []
    steady = 0
    for _, ranks in case.mismatch.classes:
        verdicts = [_changed_itself(case, rank) for rank in ranks[:ASKED_RANKS]]
        if any(verdict is True for verdict in verdicts):
            changed.append(ranks)
        elif any(verdict is False for verdict in verdicts):
            steady += 1
    return case.changed(changed[0], 0.85, say("changed_itself")) if len(changed) == 1 and steady else None


def _changed_itself(case: _Case, rank: int) -> bool | None:
    """Whether the rank's call differs from its previous one at the same line; None when there was none."""
    lane, view = case.group.lanes[rank], case.job.ranks[rank]
    row = lane.row(case.mismatch.seq)
    before = lane.rows[: int(np.searchsorted(lane.seqs, case.mismatch.seq))]
    same_line = before[view.stack[before] == view.stack[row]]
    return bool(view.sig[same_line[-1]] != view.sig[row]) if len(same_line) else None


def _left_round(case: _Case) -> CallDifference | None:
    """A rank that, at this point of its earlier rounds, always made another call, perhaps in another group."""
    classes, seq, job, lanes = case.mismatch.classes, case.mismatch.seq, case.job, case.group.lanes
    first = {ranks[0]: ranks for _, ranks in classes}
    odd = [rank for rank in first if broken_habit(job.ranks[rank], lanes[rank].row(seq)) is not None]
    if len(odd) != 1:
        return None
    (rank,), other = odd, next(r for r in first if r != odd[0])
    found = case.changed(first[rank], 0.7, say("left_round", rank=rank))
    view, row = job.ranks[rank], lanes[rank].row(seq)
    mine, theirs = int(view.stack[row]), int(job.ranks[other].stack[lanes[other].row(seq)])
    fixed = case.mismatch.part or case.mismatch.cause == "type_mismatch"
    if fixed or not mine or not theirs or mine == theirs:
        return found
    # Not one call with other arguments, but one of another line.
    groups = view.group[:row][view.stack[:row] == mine]
    if not len(groups):
        return replace(found, kind="extra", reference=other, either=True)
    own = bool((groups == case.group.index).all())  # else it is the right call in the wrong group
    known = find_difference(job, case.group, rank, other, seq, outvoted=False) if own else None
    return replace(known, ranks=first[rank]) if known is not None else found


def _fitted_by_chance(case: _Case) -> CallDifference | None:
    """Of two, the one that made a call it had never made where the lines of both parted, if the other stayed in its round."""
    classes, seq, job, lanes = case.mismatch.classes, case.mismatch.seq, case.job, case.group.lanes
    if case.mismatch.part or case.mismatch.exchange is not None or len(classes) != 2:
        return None
    one, two = classes[0][1], classes[1][1]
    pair = CallPair.of(job, case.group, one[0], two[0])
    since = pair.low + pair.apart_since(seq - pair.low) if pair is not None else seq
    odd = [r for r in (one, two) if since < seq and is_new(job.ranks[r[0]], lanes[r[0]].row(since))]
    if len(odd) != 1:
        return None
    reference, reason = (two if odd[0] is one else one)[0], say("left_round", rank=odd[0][0])
    return CallDifference(odd[0], "extra", 0.7, reason, reference, since, either=True)


def _other_groups(case: _Case) -> CallDifference | None:
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
    return case.changed(guilty, 0.8, say("other_groups", number=best))


def _aborted(case: _Case) -> CallDifference | None:
    """gloo aborts the rank whose buffer is too small, so a member without a dump speaks for the smaller size."""
    job, group, mismatch = case.job, case.group, case.mismatch
    absent = [rank for rank in group.members if rank not in group.lanes]
    if group.backend != "gloo" or not absent or mismatch.cause not in ("size_mismatch", "dtype_mismatch"):
        return None
    first = [ranks[0] for _, ranks in mismatch.classes]
    sizes = [job.input_bytes(rank, group.lanes[rank].row(mismatch.seq)) for rank in first]
    if sizes.count(max(sizes)) > 1:
        return None
    return case.changed(mismatch.classes[sizes.index(max(sizes))][1], 0.7, say("gloo_aborts"))


_RULES = (
    _diverged,
    _returned,
    _moved,
    _exchanged,
    _outvoted,
    _own_history,
    _left_round,
    _fitted_by_chance,
    _other_groups,
    _aborted,
)
