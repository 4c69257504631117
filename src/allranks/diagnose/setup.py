"""Ranks that wait in init_process_group, new_group or destroy_process_group, and those that never came there.

These are calls of all ranks too, but no collective is recorded of them. Black boxes note which of them a rank is in and how
many it has left; without black boxes the stacks of the ranks tell. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from allranks.diagnose.context import Context
from allranks.diagnose.phrasing import count as counted
from allranks.diagnose.phrasing import count_ranks, doing, place, ranks_text, seconds, who
from allranks.diagnose.waits import BELIEVABLE_S
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.trace import Progress

#: Causes of `allranks stacks` that say: the rank waits for others to set up a group.
WAITING = frozenset({"rendezvous_wait", "store_wait"})


def find_absent_in_setup(context: Context) -> Finding | None:
    """The ranks that others wait for in a function that sets up or ends groups; None when nobody waits there."""
    return _from_boxes(context) or _from_stacks(context)


def _from_boxes(context: Context) -> Finding | None:
    job, inside = context.job, _inside(context)
    if not inside:
        return None
    fewest = min(progress.setups for progress in inside.values())
    waiting = {rank: p for rank, p in inside.items() if p.setups == fewest}
    waited = _longest_wait(context, waiting)
    if waited < context.patience.limit_s and not job.ended:
        return None
    times = f" for {seconds(waited)}" if 0 < waited < BELIEVABLE_S else ""
    function = next(iter(waiting.values())).inside
    late, gone = _elsewhere(context, inside, fewest)
    lost = job.missing_ranks if function == "init_process_group" else ()
    if late or gone or lost:
        return _never_called(context, late, late or gone or lost, tuple(sorted(waiting)), function, times)
    everybody = function == "new_group" and len(inside) == len(job.ranks)
    return _all_inside(context, inside, waiting, times) if everybody else None


def _longest_wait(context: Context, waiting: dict[int, Progress]) -> float:
    """How long the first of these ranks has been inside, in seconds; BELIEVABLE_S when no time is known."""
    seen = {rank: context.job.ranks[rank].snapshot_ns for rank in waiting}
    return max(
        ((seen[rank] - p.inside_ns) / 1e9 for rank, p in waiting.items() if seen[rank]), default=BELIEVABLE_S
    )


def _never_called(
    context: Context,
    late: tuple[int, ...],
    absent: tuple[int, ...],
    waiting: tuple[int, ...],
    function: str,
    times: str,
) -> Finding:
    """`absent` ranks, of which the `late` ones still run, have not come to a function in which others wait."""
    sentence = f"{who(context.job, absent)} never called {function}; {_waiting(waiting)}{times}"
    last = context.last_call(late[0]) if len(late) == 1 else ""
    if last:
        sentence += f"; the last call of rank {late[0]} was {last}"
    found = _finding(context, absent, waiting, function, sentence, 0.9 if late else 0.7, bool(late))
    return found if found.where or not last else replace(found, where=_line(context, late[0]))


def _line(context: Context, rank: int) -> str:
    """Where a rank made the call in which it still waits; "" when it waits in none."""
    row = context.first_open(rank)
    return place(context.job.frames(rank, row)) if row >= 0 else ""


def _inside(context: Context) -> dict[int, Progress]:
    """Ranks inside a function that sets up or ends groups. Who makes its group anew while others wait for it in the old
    one is left out: it is the one to explain, not those."""
    owed = {rank for blocked in context.blocked for rank in blocked.missing}
    traces = {rank: view.trace for rank, view in context.job.ranks.items()}
    inside = {rank: trace for rank, trace in traces.items() if trace.progress.inside}
    return {rank: t.progress for rank, t in inside.items() if not (t.destroyed and rank in owed)}


def _elsewhere(
    context: Context, inside: dict[int, Progress], fewest: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that have not come to the call yet, ranks that have ended)."""
    ranks = {r: view.trace.progress for r, view in context.job.ranks.items() if r not in inside}
    late = tuple(rank for rank, p in ranks.items() if 0 <= p.setups <= fewest and not p.closed)
    return late, tuple(rank for rank, p in ranks.items() if p.closed)


def _all_inside(
    context: Context, inside: dict[int, Progress], waiting: dict[int, Progress], times: str
) -> Finding | None:
    """Everybody is in new_group and nobody gets out: they do not mean the same group."""
    ahead = tuple(sorted(rank for rank in inside if rank not in waiting))
    if context.job.missing_ranks or len(inside) < 2:
        return None
    if len(waiting) == 1:
        return _fewer_groups(context, inside, next(iter(waiting)), ahead, times)
    rest = f", {ranks_text(ahead)} in a later one" if ahead else ""
    sentence = (
        f"{who(context.job, waiting)} wait in one call of new_group{times}{rest}, and no rank is missing: they make groups in "
        "different order or with different members"
    )
    advice = "make the same groups, with the same members, in the same order on every rank"
    asked = "the lines: run `allranks stacks`; the recorder does not keep the members that a rank passed to new_group"
    return Finding(
        "order_inversion",
        tuple(sorted(waiting)),
        sentence,
        "root",
        confidence=0.6,
        waiting=tuple(sorted(inside)),
        evidence=(f"{ranks_text(inside)} entered new_group and did not leave it",),
        missing_evidence=(asked,),
        advice=(advice,),
    )


def _fewer_groups(
    context: Context, inside: dict[int, Progress], rank: int, ahead: tuple[int, ...], times: str
) -> Finding:
    """One rank has left fewer calls of new_group than all others: the next one of all of them makes different groups."""
    fewer = min(inside[other].setups for other in ahead) - inside[rank].setups
    sentence = (
        f"{who(context.job, (rank,))} made {counted(fewer, 'call')} of new_group fewer than {ranks_text(ahead)}, and all of "
        f"them wait in the next one{times}"
    )
    sure = 0.8 if len(ahead) > 1 else 0.5
    advice = "call new_group on every rank, in the same order: it is a call of all ranks, also of those outside the new group"
    return replace(
        _finding(context, (rank,), ahead, "new_group", sentence, sure, True),
        advice=(advice,),
        met_another=True,
    )


def _waiting(ranks: Collection[int]) -> str:
    return f"{count_ranks(len(ranks))} {'wait' if len(ranks) > 1 else 'waits'} in it"


def _is_elsewhere(now: RankNow) -> bool:
    """Whether the stack of a rank shows it at work somewhere else."""
    return now.cause not in WAITING | {"", "unknown", "healthy"} or (
        now.cause == "unknown" and bool(now.where)
    )


def _from_stacks(context: Context) -> Finding | None:
    """Nobody has made a call, and the stacks show some ranks waiting in init_process_group and others elsewhere."""
    job = context.job
    if any(len(view.trace.calls) for view in job.ranks.values()):
        return None
    waiting = tuple(sorted(rank for rank, now in context.seen.items() if now.cause in WAITING))
    others = tuple(sorted(now.rank for now in context.seen.values() if _is_elsewhere(now)))
    known = set(context.seen) | set(job.ranks)
    absent = others or tuple(rank for rank in range(job.world_size or 0) if rank not in known)
    if not waiting or not absent:
        return None
    unseen = "" if others else " (no stack and no dump of it)"
    sentence = f"{who(job, absent)} never came to init_process_group{unseen}; {_waiting(waiting)}"
    sure = 0.85 if others else 0.6
    return _finding(context, absent, waiting, "init_process_group", sentence, sure, bool(others))


def _finding(
    context: Context,
    absent: tuple[int, ...],
    waiting: tuple[int, ...],
    function: str,
    sentence: str,
    confidence: float,
    alive: bool,
) -> Finding:
    seen = [context.seen[rank] for rank in absent if rank in context.seen]
    shown = [*seen, *(context.seen[rank] for rank in waiting if rank in context.seen)]
    stacks = tuple(((now.rank,), now.stack) for now in shown if now.stack)
    located = next((now for now in seen if now.where), None)
    ask = f"where {ranks_text(absent)} is now: run `allranks stacks` on its node"
    advice = f"call {function} on every rank, in the same order: it is a call of all ranks, also of those outside the new group"
    if located is not None:
        sentence += f"; rank {located.rank} is at {located.where}{doing(located.cause)}"
        advice = f"look at {located.where}: rank {located.rank} is there now"
    return Finding(
        _cause(function, seen),
        absent,
        sentence,
        "root",
        confidence=confidence,
        where=next((now.where for now in shown if now.where), ""),
        waiting=waiting,
        stacks=stacks,
        evidence=(
            f"{ranks_text(waiting)} entered {function} and did not leave it",
            *(now.evidence for now in seen if now.evidence),
        ),
        missing_evidence=(ask,) if located is None and alive else (),
        advice=(advice,),
        stack_labels=tuple("live" for _ in stacks),
    )


def _cause(function: str, seen: list[RankNow]) -> str:
    if seen and all(now.cause == "gone" for now in seen):
        return "rank_died"
    return "not_started" if function == "init_process_group" else "missing_rank"
