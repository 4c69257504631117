"""Nothing hangs and nothing misfits: what may be wrong all the same, from the surest to the mildest; and warnings, which are
nobody's fault: damaged and missing files, a slow rank, pauses. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from allranks.diagnosis.absent import UNREAD, explain_ranks, lacking
from allranks.diagnosis.align import Doubt
from allranks.diagnosis.alignment import find_shift
from allranks.diagnosis.context import Context, in_words, is_secondary, line_in, place
from allranks.diagnosis.job import GroupView, Job, Lane, Now, is_synchronising
from allranks.diagnosis.mismatches import left_program
from allranks.diagnosis.p2p import newest_ns
from allranks.diagnosis.waits import Blocked, is_hung, is_paused, wait_graph
from allranks.model.diagnosis import Finding
from allranks.model.formatting import duration, one_line, ranks_text

#: Errors of torch that name the ranks they are about.
_ACCUSED = re.compile(r"[Rr]anks? (\d+(?:, \d+)*) (?:has inconsistent|failed to pass)")
#: Without a call for so long, in duration, a job is worth a question.
MIN_IDLE_S = 10.0


def quiet_roots(context: Context, doubts: list[Doubt], allow_incomplete_ranks: bool) -> list[Finding]:
    """Nothing hangs and nothing misfits: a silent extra call, or a rank that is gone?"""
    for group in context.job.groups:
        shift = find_shift(context.job, group)
        if shift is not None and shift.agreeing >= 2:
            return [left_program(context, group, shift)]
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
    votes = Counter(rank for text in ends.values() for rank in accused_in(text))
    alike = same_error(own) if not votes and len(own) == context.job.world_size else None
    if alike is not None:
        return alike
    accused, most = votes.most_common(1)[0] if votes else (-1, 0)
    first = min(own, key=lambda rank: (context.job.ranks[rank].trace.header.written_ns, rank))
    ranks = (accused,) if most * 2 > len(ends) else tuple(sorted(own))
    named = ranks == (accused,) and len(ends) > 1
    text = ends.get(ranks[0], ends[first])
    facts = {"accused": str(accused) if named else "", "how": ends[first] if named else text}
    found = context.root(
        "ended_badly", ranks, None, 0.85 if len(ranks) == 1 else 0.6, **_ended(ends), **facts
    )
    return replace(found, where=line_in(text))


def accused_in(error: str) -> tuple[int, ...]:
    """The ranks that an error of torch is about, where it names them."""
    return tuple(int(rank) for found in _ACCUSED.findall(error) for rank in found.split(", "))


def same_error(ends: Mapping[int, str]) -> Finding | None:
    """The finding where several ranks, and these are all, ended with one error at one line; None where they differ."""
    texts = [one_line(text) for _, text in sorted(ends.items())]
    if (
        len(texts) < 2
        or any(map(is_secondary, texts))
        or len({re.sub(r"\d+", "#", text) for text in texts}) > 1
    ):
        return None
    facts = {"number": len(texts), "what": texts[0].removeprefix("exception: "), "text": texts[0]}
    found = in_words("same_error", tuple(sorted(ends)), 0.0, "", {**facts, "rank": min(ends)})
    return replace(found, where=line_in(texts[0]))


def _lost_partner(context: Context, ends: dict[int, str]) -> Finding:
    """All errors say that a partner was gone: a rank without a file, or nobody knows which."""
    absent = context.job.missing_ranks
    facts = {"how": ends[min(ends)], "absent": ranks_text(absent) if absent else ""}
    return context.root("lost_partner", absent, None, 0.5 if absent else 0.35, **_ended(ends), **facts)


def _ended(ends: dict[int, str]) -> dict[str, object]:
    listed = "\n".join(f"rank {rank} ended with {text}" for rank, text in list(ends.items())[:6])
    return {"ended": ranks_text(ends), "ends": listed}


def _no_progress(context: Context) -> Finding | None:
    """Nobody is in a call, and nobody has made one for much longer than ever before: a wait that is not a collective?"""
    job = context.job
    boxes = [view for view in job.ranks.values() if view.trace.is_box and not view.trace.progress.closed]
    if not job.now_ns or len(boxes) < 2 or len(boxes) < len(job.ranks):
        return None
    said = [(v.trace.progress, v.trace.header.start_ns, newest_ns(v)) for v in boxes]
    newest = max(max(start, call, mark.step_ns, mark.inside_ns) for mark, start, call in said)
    idle = (job.now_ns - newest) / 1e9
    paused = any(is_paused(job, rank) for rank in job.ranks)
    if paused or idle < max(MIN_IDLE_S, 5 * context.patience.limit_s):
        return None
    found = context.root("no_progress", (), idle=duration(idle), reason=context.patience.reason)
    return replace(found, waited_s=idle)


def _doubtful(context: Context, doubt: Doubt) -> Finding:
    """A coalesced call said to be over that a rank never entered: it hangs there, or that dump is older."""
    blocked = Blocked(0, doubt.group, doubt.seq, doubt.rows, missing=doubt.late)
    alone = _of_one_call(context, blocked)
    finding = explain_ranks(alone, blocked, doubt.late)
    doubtful = alone.root("doubtful", doubt.late, blocked)
    return replace(
        finding,
        cause=doubtful.cause,
        ranks=doubt.late,
        sentence=doubtful.sentence,
        confidence=doubtful.confidence,
        waited_s=None,
        missing_evidence=(*doubtful.missing_evidence, *finding.missing_evidence),
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
        traces = [context.job.ranks[rank].trace for rank in rows]
        if any(trace.is_box or trace.is_hook for trace in traces) or any(
            context.seen[rank].cause == UNREAD for rank in gone if rank in context.seen
        ):
            continue  # boxes of other nodes are merely elsewhere; of torch's hook only ranks that wait leave a dump
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
    known = next((context.seen[rank].evidence for rank in gone if rank in context.seen), "")
    sure = 0.85 if known else 0.5 if told else 0.35
    finding = lacking(alone, "left_no_dump", blocked, gone, sure, put_away=told, how=known)
    return replace(finding, where="", waiting=(), waited_s=None)


WINDOW, MIN_COLLECTIVES, EXAMINED_GROUPS = 256, 10, 16
MIN_LATE_S, LATE_SHARE, LAST_SHARE = 0.005, 0.25, 0.7


def find_warnings(
    context: Context, every: list[Blocked], damaged: frozenset[int], incomplete: bool, roots: list[Finding]
) -> list[Finding]:
    """All warnings. `every`: the unfinished calls, hung or not; `incomplete`: missing files are expected."""
    found = []
    if damaged:
        found.append(context.warning("damaged_file", ranks=ranks_text(damaged)))
    blamed = {rank for root in roots for rank in root.ranks}
    absent = [rank for rank in context.job.missing_ranks if rank not in blamed]
    if absent and not incomplete:
        found.append(context.warning("missing_dump", ranks=ranks_text(absent)))
    slow = find_straggler(context) if not roots and not context.blocked else None
    young = [b for b in every if b.missing and not is_hung(context.job, b, context.patience)]
    skew = _skew(context, young) if young and not roots else None
    pause = _pause(context) if context.blocked else None
    unseen = context.warning("unrecorded") if not roots and _lost_messages(context.job) else None
    return found + [one for one in (slow, skew, pause, unseen) if one is not None]


def _lost_messages(job: Job) -> bool:
    """Whether gloo's own recorder has numbered calls that it did not keep: sends, receives, monitored barriers."""
    views = (v for v in job.ranks.values() if not v.trace.is_box and not v.trace.is_hook)
    lanes = (
        v.trace.calls["op_id"][v.group == g.index] for v in views for g in job.groups if g.backend == "gloo"
    )
    return any(bool((np.diff(numbers.astype(np.int64)) > 1).any()) for numbers in lanes)


def _skew(context: Context, young: list[Blocked]) -> Finding:
    """Ranks that are a few calls apart, as those of a running job are."""
    wait = max(filter(None, (context.waited(b) for b in young)), default=0.0)
    limit = context.patience
    facts = {"oldest": duration(wait), "reason": limit.reason, "again": duration(limit.limit_s)}
    return context.warning("skew", number=len(young), **facts)


def _pause(context: Context) -> Finding | None:
    """A pause that ranks declared and that has not ended."""
    paused = [rank for rank in context.job.ranks if is_paused(context.job, rank)]
    if not paused:
        return None
    phase = context.job.ranks[paused[0]].trace.progress.phase
    return context.warning("pause", ranks=ranks_text(paused), phase=phase)


def find_straggler(context: Context) -> Finding | None:
    """The rank that keeps the others waiting, over the collectives that all ranks of a group have in their rings."""
    job = context.job
    groups = sorted(job.groups, key=lambda g: (-len(g.lanes), -g.last, g.index))[:EXAMINED_GROUPS]
    found = [finding for group in groups if (finding := _late_in(context, group)) is not None]
    return max(found, key=lambda finding: finding.waited_s or 0.0, default=None)


def _late_in(context: Context, group: GroupView) -> Finding | None:
    job = context.job
    lanes = [lane for lane in group.lanes.values() if len(lane.seqs)]
    if len(lanes) < 2 or len(lanes) < len(group.lanes):
        return None
    low = max(lane.first for lane in lanes)
    high = min(lane.last for lane in lanes)
    low = max(low, high - WINDOW + 1)
    if high - low + 1 < MIN_COLLECTIVES:
        return None
    late = _waits(job, lanes, low, high)
    if late is None or late.shape[1] < MIN_COLLECTIVES:
        return None
    period = _period(job, lanes[0], low, high)
    typical = np.median(late, axis=1)
    slowest = int(np.argmax(typical))
    share = float((np.argmax(late, axis=0) == slowest).mean())
    behind = float(typical[slowest] - np.median(np.delete(typical, slowest)))
    if behind < max(MIN_LATE_S, LATE_SHARE * period) or share < LAST_SHARE:
        return None
    rank = lanes[slowest].rank
    found = context.root(
        "straggler",
        (rank,),
        None,
        round(min(0.95, 0.5 + share / 2), 2),
        share=f"{share:.0%}",
        number=late.shape[1],
        label=group.label,
        behind=duration(behind),
        round=f"{behind / max(period, 1e-9):.0%}",
        table=_table(lanes, typical),
    )
    return replace(
        found,
        severity="warning",
        group=group.label,
        sequence=high,
        where=place(job.frames(rank, group.lanes[rank].row(high))),
        waiting=tuple(lane.rank for lane in lanes if lane.rank != rank),
        waited_s=behind,
    )


def _waits(job: Job, lanes: list[Lane], low: int, high: int) -> np.ndarray | None:
    """Lateness in duration, ranks x collectives; None when the times do not allow telling."""
    seqs = np.arange(low, high + 1)
    created, ended = np.zeros((len(lanes), len(seqs))), np.zeros((len(lanes), len(seqs)))
    for i, lane in enumerate(lanes):
        at = np.searchsorted(lane.seqs, seqs)
        if not bool((lane.seqs[at] == seqs).all()):
            return None
        calls = job.ranks[lane.rank].trace.calls
        created[i], ended[i] = calls["created_ns"][lane.rows[at]], calls["completed_ns"][lane.rows[at]]
    family = job.ranks[lanes[0].rank].family[lanes[0].rows[np.searchsorted(lanes[0].seqs, seqs)]]
    keep = is_synchronising(family) & (created > 0).all(axis=0)
    created, ended = created[:, keep], ended[:, keep]
    if not created.shape[1]:
        return None
    if bool((ended > 0).any()):
        # How long each waited does not depend on clocks: who waits least came last.
        took = ended - created
        late: np.ndarray = (took.max(axis=0) - took) / 1e9
        return late if bool((took >= 0).all()) else None
    # Without ends only the order of entering is left: nobody can be in the next call before the last is in this one.
    possible = created.max(axis=0)[:-1] <= created.min(axis=0)[1:]
    by_clock: np.ndarray = (created - np.median(created, axis=0)) / 1e9
    return by_clock if len(possible) and float(possible.mean()) > 0.8 else None


def _period(job: Job, lane: Lane, low: int, high: int) -> float:
    rows = lane.rows[np.searchsorted(lane.seqs, low) : np.searchsorted(lane.seqs, high) + 1]
    created = job.ranks[lane.rank].trace.calls["created_ns"][rows]
    return float(np.mean(np.diff(created))) / 1e9 if len(created) > 1 else 0.0


def _table(lanes: list[Lane], typical: np.ndarray) -> str:
    order = np.argsort(-typical)[:6]
    return ", ".join(f"rank {lanes[i].rank} {duration(max(0.0, float(typical[i])))}" for i in order.tolist())
