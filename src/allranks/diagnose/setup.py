"""Ranks that wait in init_process_group, new_group or destroy_process_group, and those that never came there.

These are calls of all ranks too, but no collective is recorded of them. Black boxes note which of them a rank is in and how
many it has left; without black boxes the stacks of the ranks tell. Pure.
"""

from __future__ import annotations

from allranks.diagnose.context import Context
from allranks.diagnose.phrasing import count_ranks, ranks_text, seconds, who
from allranks.model.diagnosis import Finding, RankNow

#: Causes of `allranks stacks` that say: the rank waits for others to set up a group.
WAITING = frozenset({"rendezvous_wait", "store_wait"})


def find_absent_in_setup(context: Context) -> Finding | None:
    """The ranks that others wait for in a function that sets up or ends groups; None when nobody waits there."""
    return _from_boxes(context) or _from_stacks(context)


def _from_boxes(context: Context) -> Finding | None:
    job = context.job
    inside = {rank: view.trace.progress for rank, view in job.ranks.items() if view.trace.progress.inside}
    if not inside:
        return None
    fewest = min(progress.setups for progress in inside.values())
    waiting = {rank: p for rank, p in inside.items() if p.setups == fewest}
    function = next(iter(waiting.values())).inside
    waited = max(
        ((job.ranks[rank].snapshot_ns - p.inside_ns) / 1e9 for rank, p in waiting.items()), default=0.0
    )
    late = [
        rank
        for rank, view in job.ranks.items()
        if rank not in inside and 0 <= view.trace.progress.setups <= fewest and not view.trace.progress.closed
    ]
    gone = [rank for rank, view in job.ranks.items() if rank not in inside and view.trace.progress.closed]
    lost = list(job.missing_ranks) if function == "init_process_group" else []
    absent = tuple(sorted(late or gone or lost))
    if not absent or (waited < context.patience.limit_s and not job.ended):
        return None
    times = f" for {seconds(waited)}" if 0 < waited < 30 * 86400 else ""
    sentence = f"{who(job, absent)} never called {function}; {count_ranks(len(waiting))} {'wait' if len(waiting) > 1 else 'waits'} in it{times}"
    return _finding(
        context, absent, tuple(sorted(waiting)), function, sentence, 0.9 if late else 0.7, bool(late)
    )


def _from_stacks(context: Context) -> Finding | None:
    """Nobody has made a call, and the stacks show some ranks waiting in init_process_group and others elsewhere."""
    job = context.job
    if any(len(view.trace.calls) for view in job.ranks.values()):
        return None
    waiting = tuple(sorted(rank for rank, now in context.seen.items() if now.cause in WAITING))
    others = [
        now
        for now in context.seen.values()
        if now.cause not in WAITING | {"", "unknown", "healthy"} or (now.cause == "unknown" and now.where)
    ]
    known = set(context.seen) | set(job.ranks)
    lost = tuple(rank for rank in range(job.world_size or 0) if rank not in known)
    if not waiting or not (others or lost):
        return None
    absent = tuple(sorted(now.rank for now in others)) or lost
    where = "" if others else " (no stack and no dump of it)"
    sentence = f"{who(job, absent)} never came to init_process_group{where}; {count_ranks(len(waiting))} {'wait' if len(waiting) > 1 else 'waits'} in it"
    return _finding(
        context, absent, waiting, "init_process_group", sentence, 0.85 if others else 0.6, bool(others)
    )


def _finding(
    context: Context, absent: tuple[int, ...], waiting: tuple[int, ...], function: str, sentence: str, confidence: float, alive: bool
) -> Finding:  # fmt: skip
    seen = [context.seen[rank] for rank in absent if rank in context.seen]
    told = next((now for now in seen if now.where), None)
    if told is not None:
        doing = "" if told.cause == "unknown" else f" ({told.cause.replace('_', ' ')})"
        sentence += f"; {ranks_text((told.rank,))} is at {told.where}{doing}"
    cause = "not_started" if function == "init_process_group" else "missing_rank"
    if seen and all(now.cause == "gone" for now in seen):
        cause = "rank_died"
    evidence = [f"{ranks_text(waiting)} entered {function} and did not leave it"]
    evidence += [now.evidence for now in seen if now.evidence]
    missing = (
        (f"where {ranks_text(absent)} is now: run `allranks stacks` on its node",)
        if told is None and alive
        else ()
    )
    shown: list[RankNow] = [*seen, *(context.seen[rank] for rank in waiting if rank in context.seen)]
    stacks = tuple(((now.rank,), now.stack) for now in shown if now.stack)
    place = next((now.where for now in shown if now.where), "")
    advice = (
        f"look at {told.where}: {ranks_text((told.rank,))} is there now" if told
        else f"call {function} on every rank, in the same order: it is a call of all ranks, also of those outside the new group"
    )  # fmt: skip
    return Finding(
        cause, absent, sentence, "root", "", None, confidence, place, waiting, None, stacks, tuple(evidence), missing, (advice,),
        tuple("live" for _ in stacks),
    )  # fmt: skip
