"""Ranks whose calls differ while the job runs: named from the records alone, before anybody has waited long. Pure.

The agent reads the newest calls of its ranks about once a second, which costs the ranks nothing, and asks here. A finding counts
when it needs no wait: two ranks made calls that do not fit, one left the program of the others (by its lines or step marks), or
ranks wait for each other in a circle. What rests on a rank that has not come yet is a matter for the hang watch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from allranks.diagnosis.align import align, only_replica_groups, without_replica_groups
from allranks.diagnosis.alignment import CallDifference, CallPair, broken_habit, find_shift
from allranks.diagnosis.context import Context
from allranks.diagnosis.job import GroupView, Job, Now, RankCalls
from allranks.diagnosis.mismatches import left_program
from allranks.diagnosis.verdict import DiagnoseOptions, diagnose
from allranks.diagnosis.waits import Patience, wait_graph
from allranks.model.diagnosis import Finding
from allranks.model.trace import RankTrace

#: Rules of kinds.py whose findings rest on calls that have been made,
MADE = frozenset({"other_operation", "other_arguments", "other_splits", "no_majority", "message_differs"})
#: and on where ranks wait at this moment: these count when a rank made a call that it never made at this point before, and the wait lasts.
WAITING = frozenset(
    {"inversion", "no_partner", "tags_differ", "extra_in_circle", "went_on_without", "one_too_many"}
)
LASTS_S = 2.0
#: Calls that two ranks must have in common before a difference of their step marks, and calls in which it shows, at least.
COMMON, APART = 6, 2
#: Calls that must fit again behind one that was skipped or added.
AGREEING = 2


def find_divergence(traces: Sequence[RankTrace], now_ns: int, of_replicas: bool = False) -> Finding | None:
    """The first difference between the calls of these ranks, read at `now_ns`; None while all make the same calls.

    `of_replicas`: between replicas instead of inside them. One that heals is at another step: only calls that do not fit count.
    """
    traces = only_replica_groups(traces) if of_replicas else without_replica_groups(traces)
    options = DiagnoseOptions(now_ns=now_ns, allow_incomplete_ranks=True, consequences=0)
    findings = diagnose(traces, options=options).findings
    job, anew = align(traces, now_ns=now_ns), _made_anew(traces)
    roots = (
        found for found in findings if found.severity == "root" and found.ranks and found.group not in anew
    )
    if of_replicas:
        return next((root for root in roots if root.kind in MADE), None)
    return next((root for root in roots if _counts(job, root)), None) or _left_program(job, anew)


def _counts(job: Job, found: Finding) -> bool:
    """Whether a finding needs no wait, or the wait is that of a rank which left its own round.

    Calls that are not waited for look like waits: a rank that computes with two of them open is in no circle, and a thread that
    waits keeps no other thread from its calls.
    """
    if found.kind in MADE or found.met_another:
        return True
    if found.kind not in WAITING or (found.waited_s or 0.0) < LASTS_S:
        return False
    ranks = [job.ranks[rank] for rank in {*found.ranks, *found.waiting} if rank in job.ranks]
    if any(len(np.unique(view.trace.calls["thread"])) > 1 for view in ranks):
        return False
    return any(_left_round(view) for view in ranks)


def _left_round(view: RankCalls) -> bool:
    rows = np.flatnonzero(view.now == Now.OPEN).tolist()
    return any(broken_habit(view, row) is not None for row in (rows or [len(view.now) - 1]) if row > 0)


def _made_anew(traces: Sequence[RankTrace]) -> frozenset[str]:
    """Names and descriptions of groups that some rank has destroyed: a group of that name may be another on two ranks."""
    gone = (trace.groups[index] for trace in traces for index in trace.destroyed if index < len(trace.groups))
    return frozenset(name for group in gone for name in (group.name, group.desc) if name)


def _left_program(job: Job, anew: frozenset[str]) -> Finding | None:
    """A rank whose calls all fit, but one fewer or more of them, by their lines or by the training steps they were made in."""
    for group in job.groups:
        if group.label in anew or group.name in anew:
            continue
        shift = find_shift(job, group)
        found = shift if shift is not None and shift.agreeing >= AGREEING else _group_by_steps(job, group)
        if found is not None:
            context = Context(job, Patience(0.0, ""), (), wait_graph(job, []), {}, ())
            return left_program(context, group, found)
    return None


def _group_by_steps(job: Job, group: GroupView) -> CallDifference | None:
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    if len(lanes) < 2:
        return None
    at = min(lane.last for lane in lanes)
    rows = {lane.rank: lane.row(at) for lane in lanes}
    steps = {rank: int(job.ranks[rank].trace.calls["step"][row]) for rank, row in rows.items() if row >= 0}
    values, counts = np.unique(list(steps.values()), return_counts=True)
    if len(values) < 2 or int(values[0]) < 0:
        return None
    usual = int(values[np.argmax(counts)])
    reference = next(rank for rank, step in steps.items() if step == usual)
    odd = [rank for rank, step in steps.items() if step != usual]
    found = [d for rank in odd if (d := _apart(job, group, rank, reference)) is not None]
    if not found:
        return None
    same = tuple(d.rank for d in found if (d.kind, d.seq) == (found[0].kind, found[0].seq))
    return replace(found[0], ranks=same, confidence=0.6 if len(steps) == 2 else found[0].confidence)


def _apart(job: Job, group: GroupView, rank: int, reference: int) -> CallDifference | None:
    pair = CallPair.of(job, group, rank, reference)
    found = pair.by_steps() if pair is not None else None
    if pair is None or found is None:
        return None
    at, length = found.seq - pair.low, min(len(pair.mine), len(pair.theirs))
    return found if at >= COMMON and length - at >= APART else None
