"""Ranks that wait for each other in a circle: somebody skipped a call, or two ranks take two groups in different order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.absent import explain_ranks, shifted
from allranks.diagnose.context import Context, p2p_text
from allranks.diagnose.shift import find_stack_shift
from allranks.diagnose.waits import Blocked
from allranks.diagnose.words import place, ranks_text, who
from allranks.model.diagnosis import Finding

#: So many earlier rounds of its own must a rank have broken with, where no other rank's order can be compared.
ROUNDS = 3


def explain_cycle(context: Context, sink: tuple[int, ...]) -> Finding:
    """The finding for a strongly connected sink of the wait-for graph."""
    ranks = tuple(node for node in sink if node >= 0)
    calls = [context.blocked[-1 - node] for node in sink if node < 0]
    p2p = [call for call in calls if call.p2p is not None]
    if p2p:
        return _p2p_cycle(context, ranks, p2p, calls)
    for call in calls:
        shift = find_stack_shift(context.job, context.group(call))
        if shift is not None and shift.seq <= call.seq:
            return shifted(context, call, context.group(call), shift)
    skipped = [
        (call, rank)
        for call in calls
        for rank in call.missing
        if rank in ranks and _skipped(context, call, rank)
    ]
    guilty = sorted({rank for _, rank in skipped})
    if guilty and len(guilty) < len(ranks):
        call = min((c for c, rank in skipped if rank == guilty[0]), key=lambda c: context.began_ns(c))
        finding = explain_ranks(context, call, tuple(r for r in guilty if r in call.missing))
        evidence = f"{ranks_text(guilty)} went on to a later call without it, which {_others(context, call)} do not do"
        return replace(finding, evidence=(*finding.evidence, evidence))
    return _inversion(context, ranks, calls)


def _others(context: Context, call: Blocked) -> str:
    return ranks_text(call.waiters) if call.waiters else "the others"


def _skipped(context: Context, call: Blocked, rank: int) -> bool:
    """Whether the rank went on to another group's call although it, and its like, always made this call before."""
    held = [
        other
        for other in context.blocked
        if rank in other.rows and other.group != call.group and other.seq >= 0
    ]
    lane = context.group(call).lanes.get(rank)
    if not held or lane is None:
        return False
    other = min(held, key=lambda b: b.rows[rank])
    rounds = _rounds(context, rank, call.group, other)
    if rounds == 0:
        return False
    return rounds >= ROUNDS or _supported(context, call, other, rank)


def _rounds(context: Context, rank: int, group: int, other: Blocked) -> int:
    """How many rounds of `other`'s group in a row had the same number of calls of `group`, and more than this one."""
    lane, theirs = context.job.groups[group].lanes[rank], context.group(other).lanes[rank]
    ends = theirs.rows[: int(np.searchsorted(theirs.seqs, other.seq)) + 1]
    counts = np.diff(np.searchsorted(lane.rows, np.concatenate(([-1], ends))))
    if len(counts) < 2 or counts[-2] <= counts[-1]:
        return 0
    different = np.flatnonzero(counts[:-1] != counts[-2])
    return len(counts) - 1 - (int(different[-1]) + 1 if len(different) else 0)


def _supported(context: Context, call: Blocked, other: Blocked, rank: int) -> bool:
    """Whether another rank came to `other` the usual way: a call at the same line, or of the same kind, just before."""
    waiter, row = min(call.rows.items())
    stack, sig = context.job.ranks[waiter].stack[row], context.job.ranks[waiter].sig[row]
    for peer, at in other.rows.items():
        if peer == rank or peer in call.rows or at == 0:
            continue
        view = context.job.ranks[peer]
        before = view.stack[:at]
        same = before[-1] == stack if stack else view.sig[at - 1] == sig
        if bool(same) and int(view.group[at - 1]) != other.group:
            return True
    return False


def _inversion(context: Context, ranks: tuple[int, ...], calls: list[Blocked]) -> Finding:
    ranks = ranks or tuple(sorted({rank for call in calls for rank in _opposed(calls, call)}))
    calls = sorted(calls, key=lambda call: (context.began_ns(call), call.index))
    steps = []
    for call in calls[:6]:
        inside = tuple(rank for rank in call.waiters if rank in ranks)
        lacking = tuple(rank for rank in call.missing if rank in ranks)
        order = f", which lacks {ranks_text(lacking)}" if lacking else " first"
        at = context.place(call)
        steps.append(
            f"{ranks_text(inside)} wait{'s' if len(inside) == 1 else ''} in {context.call(call)}{f' at {at}' if at else ''}{order}"
        )
    groups = list(dict.fromkeys(context.group(call).label for call in calls))
    sentence = f"{who(context.job, ranks)} enter the groups {' and '.join(groups[:4])} in different order and wait for each other: {'; '.join(steps[:3])}"
    first = calls[0]
    return Finding(
        "order_inversion", ranks, sentence, "root", context.group(first).label, first.seq, 0.85, context.place(first),
        context.waiters_behind(ranks), context.waited(first),
        tuple(entry for call in calls[:6] for entry in context.stacks((r, row) for r, row in call.rows.items() if r in ranks)),
        tuple(steps), (), ("let all ranks enter these groups in the same order, or in one batch",),
    )  # fmt: skip


def _opposed(calls: list[Blocked], call: Blocked) -> list[int]:
    """Ranks that issued this call before another of the circle, while somebody else did it the other way round."""
    found = []
    for other in calls:
        shared = [rank for rank in call.rows if rank in other.rows] if other is not call else []
        before = {rank for rank in shared if call.rows[rank] < other.rows[rank]}
        if before and before != set(shared):
            found += shared
    return found


def _p2p_cycle(context: Context, ranks: tuple[int, ...], p2p: list[Blocked], calls: list[Blocked]) -> Finding:
    """A circle with a send or receive in it: crossed, or without partner."""
    ends = sorted({rank for call in p2p if call.p2p for rank in (call.p2p.rank, call.p2p.peer)} & set(ranks))
    guilty = tuple(ends) or ranks
    parts = []
    for call in p2p[:4]:
        assert call.p2p is not None
        at = place(context.job.frames(call.p2p.rank, call.p2p.row))
        parts.append(
            f"rank {call.p2p.rank} waits in {p2p_text(call.p2p, context.group(call).label)}{f' at {at}' if at else ''}"
        )
    rest = [f"{ranks_text(call.waiters)} in {context.call(call)}" for call in calls if call.p2p is None][:2]
    sentence = f"{who(context.job, guilty)} wait for each other, no partner posted: " + "; ".join(
        parts + rest
    )
    first = p2p[0]
    return Finding(
        "p2p_mismatch", guilty, sentence, "root", context.group(first).label, None, 0.85, context.place(first),
        context.waiters_behind(guilty), context.waited(first),
        tuple(entry for call in calls[:6] for entry in context.stacks(call.rows.items())), tuple(parts + rest), (),
        ("give every send its receive, and post both in one batch_isend_irecv where two ranks exchange",),
    )  # fmt: skip
