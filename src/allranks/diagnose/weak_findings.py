"""Nothing hangs and nothing misfits: what may be wrong all the same, from the surest to the mildest."""

from __future__ import annotations

from dataclasses import replace

from allranks.diagnose.absent import explain_ranks, shifted
from allranks.diagnose.align import is_box
from allranks.diagnose.context import Context
from allranks.diagnose.false_completions import Doubt
from allranks.diagnose.graph import wait_graph
from allranks.diagnose.job import Now
from allranks.diagnose.phrasing import ranks_text
from allranks.diagnose.shift import find_stack_shift
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding


def quiet_roots(context: Context, doubts: list[Doubt], allow_incomplete_ranks: bool) -> list[Finding]:
    """Nothing hangs and nothing misfits: a silent extra call, or a rank that is gone?"""
    for group in context.job.groups:
        shift = find_stack_shift(context.job, group)
        if shift is not None and shift.agreeing >= 2:
            return [shifted(context, None, group, shift)]
    gone = None if allow_incomplete_ranks else _gone_unnoticed(context)
    if gone is not None:
        return [gone]
    return [_doubtful(context, doubt) for doubt in doubts]


def _doubtful(context: Context, doubt: Doubt) -> Finding:
    """A coalesced call said to be over that a rank never entered: it hangs there, or that dump is older."""
    blocked = Blocked(0, doubt.group, doubt.seq, doubt.rows, missing=doubt.late)
    alone = Context(
        context.job, context.patience, (blocked,), wait_graph(context.job, [blocked]), context.seen
    )
    finding = explain_ranks(alone, blocked, doubt.late)
    sentence = (
        f"{ranks_text(doubt.late)} is not seen in {alone.call(blocked)}, in which {ranks_text(doubt.rows)} stand; NCCL marks "
        f"coalesced calls completed too early: either it never entered, or its dump is older than the others"
    )
    again = "a second dump of all ranks: where nothing has moved, the job hangs"
    asked = (again, *finding.missing_evidence)
    finding = replace(
        finding, cause="missing_rank", ranks=doubt.late, sentence=sentence, missing_evidence=asked
    )
    return replace(finding, confidence=0.35, waited_s=None)


def _gone_unnoticed(context: Context) -> Finding | None:
    """A rank without a dump whose partners' last call was put away, finished or failed: the recorder cannot tell."""
    absent = set(context.job.missing_ranks)
    for group in context.job.groups:
        gone = tuple(rank for rank in group.members if rank in absent)
        lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
        if not gone or not lanes:
            continue
        last = max(lane.last for lane in lanes)
        rows = {lane.rank: lane.row(last) for lane in lanes if lane.last == last}
        if any(is_box(context.job.ranks[rank].trace) for rank in rows):
            continue  # each node keeps its own black boxes: those of other nodes are merely elsewhere
        told = any(context.job.ranks[rank].now[row] == Now.LEFT for rank, row in rows.items())
        if told or len(gone) <= max(1, len(group.members) // 4):
            blocked = Blocked(0, group.index, last, rows, absent=gone)
            alone = Context(
                context.job, context.patience, (blocked,), wait_graph(context.job, [blocked]), context.seen
            )
            finding = explain_ranks(alone, blocked, gone)
            if told:
                return replace(finding, confidence=round(finding.confidence * 0.9, 2))
            sentence = f"{ranks_text(gone)} left no dump, and the calls of all other ranks are over: it may have died"
            return replace(finding, confidence=0.35, sentence=sentence, waiting=(), waited_s=None)
    return None
