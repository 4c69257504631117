"""Ranks that wait for each other in a circle: somebody skipped a call, or two ranks take two groups in different order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.absent import left_out, shifted
from allranks.diagnose.call_habits import step_keys, successors
from allranks.diagnose.context import Context
from allranks.diagnose.crossed import crossed, one_left_out
from allranks.diagnose.lacking import draft, settled, waiting_text
from allranks.diagnose.ops import is_p2p
from allranks.diagnose.phrasing import place, ranks_text, ranks_wait, who
from allranks.diagnose.shift import find_stack_shift
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding

#: So many earlier rounds of its own must a rank have broken with, where no other rank's order can be compared.
ROUNDS = 3
#: How many calls back a skipped one is looked for.
FOLLOWED = 256


def explain_cycle(context: Context, sink: tuple[int, ...]) -> Finding:
    """The finding for a strongly connected sink of the wait-for graph."""
    ranks = tuple(node for node in sink if node >= 0)
    calls = [context.blocked[-1 - node] for node in sink if node < 0]
    collectives = [call for call in calls if call.p2p is None]
    for call in collectives:
        shift = find_stack_shift(context.job, context.group(call))
        if shift is not None and shift.seq <= call.seq:
            return shifted(context, call, context.group(call), shift)
    one = _left_out(context, ranks, calls, collectives)
    if one is not None:
        return one
    p2p = [call for call in calls if call.p2p is not None]
    if p2p:
        return one_left_out(context, ranks, calls) or crossed(context, ranks, p2p, calls)
    return _inversion(context, ranks, calls)


def _left_out(
    context: Context, ranks: tuple[int, ...], calls: list[Blocked], collectives: list[Blocked]
) -> Finding | None:
    """One rank, or all the guilty ones of one call, went on without it. Where several left their round at once nobody
    skipped a call: they take the groups in another order."""
    skipped = {call.index: found for call in collectives if (found := _skippers(context, call, ranks))}
    guilty = sorted({rank for found in skipped.values() for rank in found})
    everybody = set(ranks) or {rank for call in calls for rank in call.rows}
    one_call = len(skipped) == 1 and len(guilty) < len(everybody)
    if len(guilty) != 1 and not one_call:
        return None
    missed = [context.blocked[index] for index, found in skipped.items() if guilty[0] in found]
    call = min(missed, key=context.age)
    added = _added(context, call, guilty[0]) if len(guilty) == 1 else None
    return added or left_out(context, call, skipped[call.index])


def _added(context: Context, call: Blocked, rank: int) -> Finding | None:
    """The rank does not come to a call because it waits in one that it has never made before."""
    row = context.first_open(rank)
    mine = next((b for b in context.blocked if b.rows.get(rank) == row), None)
    if mine is None or len(mine.rows) > 1 or not _is_new(context, mine, rank, row):
        return None
    at, missed = place(context.job.frames(rank, row)), context.place(call)
    verb = "made an extra" if mine.p2p is None else "posted an extra"
    sentence = (
        f"{who(context.job, (rank,))} {verb} {context.call(mine)}{f' at {at}' if at else ''}, as never before, and does not "
        f"come to {context.call(call)}{f' ({missed})' if missed else ''}; {waiting_text(context, call, (rank,))}"
    )
    cause = "extra_collective" if mine.p2p is None else "p2p_mismatch"
    advice = f"make the call at {at or 'that line'} on all ranks that it needs, or on none"
    base = draft(context, call, (rank,))
    evidence = (*base.evidence, f"in all earlier rounds rank {rank} came to that call at this point")
    return replace(settled(base, sentence, 0.75, advice, cause), where=at, evidence=evidence)


def _is_new(context: Context, call: Blocked, rank: int, row: int) -> bool:
    """Whether the rank has never made this call before, nor have others: else it came to it too early."""
    view = context.job.ranks[rank]
    peers = view.trace.calls["peer"]
    known = (view.stack[:row] == view.stack[row]) & (peers[:row] == peers[row])
    if row < 1 or not view.stack[row] or bool(known.any()):
        return False
    others = (other for r, other in context.job.ranks.items() if r != rank and call.p2p is None)
    return not any(bool((other.stack == view.stack[row]).any()) for other in others)


def _skippers(context: Context, call: Blocked, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks that are not in the call, or came to it only after another one that is blocked, because they skipped it."""
    missing = [rank for rank in call.missing if rank in ranks]
    late = missing + [rank for rank, row in call.rows.items() if row != context.first_open(rank)]
    return tuple(rank for rank in late if _skipped(context, call, rank))


def _skipped(context: Context, call: Blocked, rank: int) -> bool:
    """Whether the rank went on to another call where it, in all earlier rounds, made a call of this group.

    One earlier round is enough if ranks that wait in the call came to it the usual way; without such witnesses the
    rank must have broken with a habit of several rounds.
    """
    view = context.job.ranks[rank]
    lane = context.group(call).lanes.get(rank)
    if lane is None:
        return False
    end = call.rows.get(rank, len(view.sig))
    before = lane.rows[lane.rows < end]
    threads, went_on = view.trace.calls["thread"], context.first_open(rank)
    if len(before) and went_on >= 0 and threads[before[-1]] != threads[went_on]:
        return False  # what one thread does next says nothing about what another has left out
    start = int(before[-1]) + 1 if len(before) else 1
    key = step_keys(view)
    waiter, at = min(call.rows.items())
    stack = context.job.ranks[waiter].stack[at]
    for row in range(max(start, end - FOLLOWED), end):
        habit = successors(key, row)
        if len(habit) and bool(((view.group[habit] == call.group) & ~is_p2p(view.family[habit])).all()):
            if bool((view.stack[habit] == stack).all()):
                return len(habit) >= ROUNDS or _witnessed(context, call, rank, row, ())
            # At another line than ever before the round itself may have changed: ask those outside the call.
            return _witnessed(context, call, rank, row, call.waiters)
    return went_on >= 1 and not len(successors(key, went_on)) and _came_directly(context, call, rank, went_on)


def _witnessed(context: Context, call: Blocked, rank: int, went_on: int, deaf: tuple[int, ...]) -> bool:
    """Whether somebody else (but the `deaf`), after what this rank did last, made the call that it left out."""
    job = context.job
    before = job.ranks[rank]
    waiter, row = min(call.rows.items())
    stack, sig = job.ranks[waiter].stack[row], job.ranks[waiter].sig[row]
    for peer, view in job.ranks.items():
        if peer == rank or peer in deaf or not len(view.sig):
            continue
        alike = (view.stack == stack) if stack else (view.sig == sig)
        at = int(np.flatnonzero(alike)[-1]) if alike.any() else 0
        same_line = at > 0 and view.stack[at - 1] == before.stack[went_on - 1]
        if same_line and view.sig[at - 1] == before.sig[went_on - 1]:
            return True
    return False


def _came_directly(context: Context, call: Blocked, rank: int, went_on: int) -> bool:
    """In a first round: the rank has called this group before, and others made a like call just before where it is.

    Who lacks in the call itself is no witness: what it did before was an earlier call.
    """
    job = context.job
    view = job.ranks[rank]
    waiter, row = min(call.rows.items())
    sig = job.ranks[waiter].sig[row]
    used = bool((view.group[:went_on] == call.group).any()) and view.trace.header.dropped == 0
    for blocked in context.blocked if used else ():
        if blocked.rows.get(rank) != went_on or blocked.seq < 0:
            continue
        peers = {p: at for p, at in blocked.rows.items() if p != rank and p not in call.missing and at > 0}
        others = [(job.ranks[peer], at) for peer, at in peers.items()]
        alike = [o for o, at in others if o.sig[at - 1] == sig and int(o.group[at - 1]) != blocked.group]
        if len(alike) * 2 > len(others):
            return True
    return False


def _inversion(context: Context, ranks: tuple[int, ...], calls: list[Blocked]) -> Finding:
    ranks = ranks or tuple(sorted({rank for call in calls for rank in _opposed(calls, call)}))
    ranks = ranks or tuple(sorted({rank for call in calls for rank in call.rows}))
    calls = sorted(calls, key=context.age)
    steps = [_waiting_in(context, call, ranks) for call in calls[:6]]
    groups = " and ".join(list(dict.fromkeys(context.group(call).label for call in calls))[:4])
    subject, first = who(context.job, ranks), calls[0]
    inside = [[(rank, row) for rank, row in call.rows.items() if rank in ranks] for call in calls[:6]]
    return Finding(
        "order_inversion",
        ranks,
        f"{subject} enter the groups {groups} in different order and wait for each other: {'; '.join(steps[:3])}",
        "root",
        context.group(first).label,
        first.seq,
        0.7 if context.forgetful(ranks) else 0.85,
        context.place(first),
        context.waiters_behind(ranks),
        context.waited(first),
        tuple(entry for rows in inside for entry in context.stacks(rows)),
        tuple(steps),
        advice=("let all ranks enter these groups in the same order, or in one batch",),
    )


def _waiting_in(context: Context, call: Blocked, ranks: tuple[int, ...]) -> str:
    """Who of these ranks waits in the call, and for whom of them."""
    lacking = tuple(rank for rank in call.missing if rank in ranks)
    order = f", which lacks {ranks_text(lacking)}" if lacking else " first"
    waiters = [rank for rank in call.waiters if rank in ranks]
    if not lacking:  # they are in all of these calls: in which of them first
        waiters = [rank for rank in waiters if call.rows[rank] == context.first_open(rank)] or waiters
    return f"{ranks_wait(waiters)} in {context.call(call)}{context.at(call)}{order}"


def _opposed(calls: list[Blocked], call: Blocked) -> list[int]:
    """Ranks that issued this call before another of the circle, while somebody else did it the other way round."""
    found = []
    for other in calls:
        shared = [rank for rank in call.rows if rank in other.rows] if other is not call else []
        before = {rank for rank in shared if call.rows[rank] < other.rows[rank]}
        if before and before != set(shared):
            found += shared
    return found
