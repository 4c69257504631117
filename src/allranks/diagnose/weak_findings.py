"""Nothing hangs and nothing misfits: what may be wrong all the same, from the surest to the mildest."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from allranks.diagnose.absent import explain_ranks, shifted
from allranks.diagnose.align import is_box
from allranks.diagnose.context import Context
from allranks.diagnose.false_completions import Doubt
from allranks.diagnose.graph import wait_graph
from allranks.diagnose.job import Now
from allranks.diagnose.p2p import newest_ns
from allranks.diagnose.phrasing import is_secondary, line_in, one_line, ranks_text, seconds, who
from allranks.diagnose.shift import find_stack_shift
from allranks.diagnose.waits import Blocked, is_paused
from allranks.model.diagnosis import Finding

#: Errors of torch that name the rank they are about.
_ACCUSED = re.compile(r"[Rr]ank (\d+) (?:has inconsistent|failed to pass)")
#: Without a call for so long, in seconds, a job is worth a question.
MIN_IDLE_S = 10.0


def quiet_roots(context: Context, doubts: list[Doubt], allow_incomplete_ranks: bool) -> list[Finding]:
    """Nothing hangs and nothing misfits: a silent extra call, or a rank that is gone?"""
    for group in context.job.groups:
        shift = find_stack_shift(context.job, group)
        if shift is not None and shift.agreeing >= 2:
            return [shifted(context, None, group, shift)]
    found = ended_badly(context) or (None if allow_incomplete_ranks else _gone_unnoticed(context))
    if found is not None:
        return [found]
    if doubts:
        return [_doubtful(context, doubt) for doubt in doubts]
    silent = _no_progress(context)
    return [silent] if silent is not None else []


def ended_badly(context: Context, primary: bool = False) -> Finding | None:
    """Ranks whose program ended with an exception or a signal while no call tells of it: those that their errors accuse,
    else those whose error is not that a partner is gone; `primary`: these alone."""
    ends = {rank: view.trace.progress.closed for rank, view in context.job.ranks.items()}
    ends = {rank: one_line(text) for rank, text in ends.items() if text not in ("", "exit")}
    if not ends:
        return None
    own = {rank: text for rank, text in ends.items() if not is_secondary(text)}
    if not own:
        return None if primary else _lost_partner(context, ends)
    votes = Counter(int(rank) for text in ends.values() for rank in _ACCUSED.findall(text))
    accused, most = votes.most_common(1)[0] if votes else (-1, 0)
    first = min(own, key=lambda rank: (context.job.ranks[rank].trace.header.written_ns, rank))
    ranks = (accused,) if most * 2 > len(ends) else tuple(sorted(own))
    text = ends.get(ranks[0], ends[first])
    sentence = f"{who(context.job, ranks)} ended with {text}"
    if ranks == (accused,) and len(ends) > 1:
        sentence = f"{ranks_text(ends)} ended with an error that names rank {accused}: {ends[first]}"
    return _ended(ranks, sentence, 0.85 if len(ranks) == 1 else 0.6, line_in(text), ends)


def _lost_partner(context: Context, ends: dict[int, str]) -> Finding:
    """All errors say that a partner was gone: a rank without a file, or nobody knows which."""
    absent, first = context.job.missing_ranks, min(ends)
    sentence = f"{ranks_text(ends)} ended with errors that say a partner was gone: {ends[first]}"
    sentence += f"; there is no file of {ranks_text(absent)}" if absent else ""
    return _ended(absent, sentence, 0.5 if absent else 0.35, "", ends)


def _ended(
    ranks: tuple[int, ...], sentence: str, confidence: float, at: str, ends: dict[int, str]
) -> Finding:
    evidence = tuple(f"rank {rank} ended with {text}" for rank, text in list(ends.items())[:6])
    advice = (f"read the traceback in the log of {ranks_text(ranks or ends)}",)
    finding = Finding("rank_died", ranks, sentence, "root", confidence=confidence, where=at)
    return replace(finding, evidence=evidence, advice=advice)


def _no_progress(context: Context) -> Finding | None:
    """Nobody is in a call, and nobody has made one for much longer than ever before: a wait that is no collective?"""
    job = context.job
    boxes = [view for view in job.ranks.values() if is_box(view.trace) and not view.trace.progress.closed]
    if not job.now_ns or len(boxes) < 2 or len(boxes) < len(job.ranks):
        return None
    said = [(v.trace.progress, v.trace.header.start_ns, newest_ns(v)) for v in boxes]
    newest = max(max(start, call, mark.step_ns, mark.inside_ns) for mark, start, call in said)
    idle = (job.now_ns - newest) / 1e9
    paused = any(is_paused(job, rank) for rank in job.ranks)
    if paused or idle < max(MIN_IDLE_S, 5 * context.patience.limit_s):
        return None
    sentence = (
        f"no rank is in a collective, and none has made a call for {seconds(idle)} ({context.patience.reason}): all of them "
        "compute, or they wait for something else, such as a store, a file or a lock"
    )
    asked = "where the ranks are: run `allranks stacks` on every node"
    return Finding(
        "no_progress", (), sentence, "root", confidence=0.35, waited_s=idle, missing_evidence=(asked,)
    )


def _doubtful(context: Context, doubt: Doubt) -> Finding:
    """A coalesced call said to be over that a rank never entered: it hangs there, or that dump is older."""
    blocked = Blocked(0, doubt.group, doubt.seq, doubt.rows, missing=doubt.late)
    alone = _of_one_call(context, blocked)
    finding = explain_ranks(alone, blocked, doubt.late)
    sentence = (
        f"{ranks_text(doubt.late)} is not seen in {alone.call(blocked)}, in which {ranks_text(doubt.rows)} stand; NCCL marks "
        f"coalesced calls completed too early: either it never entered, or its dump is older than the others"
    )
    again = "a second dump of all ranks: where nothing has moved, the job hangs"
    return replace(
        finding,
        cause="missing_rank",
        ranks=doubt.late,
        sentence=sentence,
        confidence=0.35,
        waited_s=None,
        missing_evidence=(again, *finding.missing_evidence),
    )


def _of_one_call(context: Context, blocked: Blocked) -> Context:
    """The same job with this call alone blocked."""
    graph = wait_graph(context.job, [blocked])
    return Context(context.job, context.patience, (blocked,), graph, context.seen)


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
            return _left_no_dump(context, Blocked(0, group.index, last, rows, absent=gone), told)
    return None


def _left_no_dump(context: Context, blocked: Blocked, told: bool) -> Finding:
    """What is known of ranks without a dump; `told`: the last call of the others was put away, finished or failed."""
    alone = _of_one_call(context, blocked)
    finding, gone = explain_ranks(alone, blocked, blocked.absent), blocked.absent
    if finding.cause != "rank_died":
        return replace(finding, confidence=round(finding.confidence * 0.9, 2))
    over = "are over"
    if told:
        over = f"were put away ({alone.call(blocked)} last), whether finished or failed is not recorded"
    known = next((context.seen[rank].evidence for rank in gone if rank in context.seen), "")
    sentence = f"{ranks_text(gone)} left no dump, and the calls of all other ranks {over}: {known or 'it may have died'}"
    sure = 0.85 if known else 0.5 if told else 0.35
    return replace(finding, confidence=sure, sentence=sentence, waiting=(), waited_s=None)
