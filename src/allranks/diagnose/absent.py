"""A rank that others wait for and that waits for nobody: never entered, stuck elsewhere, dead, or innocent after all."""

from __future__ import annotations

from dataclasses import replace

from allranks.diagnose.align import is_box
from allranks.diagnose.call_sequences import MAX_CALLS, Divergence
from allranks.diagnose.context import Context, Stacks
from allranks.diagnose.culprit import find_stack_shift
from allranks.diagnose.divergence import (
    find_divergence,
    find_skip_over_groups,
    left_program,
    odd_one,
)
from allranks.diagnose.job import GroupView
from allranks.diagnose.lacking import draft, explain_without_file, settled, their, waiting_text, wrong_peer
from allranks.diagnose.phrasing import doing, is_secondary, line_in, one_line, place, ranks_text, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.trace import State

QUICK_FAILURE = "the others' calls failed long before their timeout, as they do when a peer is gone"
#: Causes of `allranks stacks` that say the rank is inside a call after all, or say nothing.
UNTELLING = frozenset({"", "unknown", "healthy", "collective_wait", "p2p_wait", "gone"})


def explain_ranks(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """The finding for ranks that all lack in the same blocked call."""
    group = context.group(blocked)
    crossed = wrong_peer(context, blocked) if blocked.p2p is not None else None
    if crossed is not None:
        return crossed
    if all(rank not in context.job.ranks for rank in ranks):
        return explain_without_file(context, blocked, ranks)
    ranks = tuple(rank for rank in ranks if rank in context.job.ranks)
    if blocked.p2p is None:
        if (divergence := _by_steps(context, blocked, ranks)) is not None:
            return left_program(context, group, divergence, blocked)
        shift = find_stack_shift(context.job, group)
        if shift is not None and shift.seq <= blocked.seq:
            return left_program(context, group, shift, blocked)
        if _one_against_all(context, blocked, group, ranks):
            return _lone_waiter(context, blocked, ranks)
        if (skip := _over_groups(context, blocked, ranks)) is not None:
            return left_program(context, group, skip, blocked)
    return _never_entered(context, blocked, ranks)


def _by_steps(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Divergence | None:
    """Where the step marks of a rank that lacks and of one that waits part, if they do."""
    group = context.group(blocked)
    waiter, rank = min(blocked.rows), ranks[0]
    if len(ranks) > 1 or rank not in group.lanes or not len(group.lanes[rank].seqs):
        return None
    if len(group.lanes) == 2:
        return odd_one(context.job, group, rank, waiter)
    return find_divergence(context.job, group, rank, waiter)


def _over_groups(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Divergence | None:
    """The call of this group that a lacking rank left out on its way through several groups, if it did."""
    group, waiter = context.group(blocked), min(blocked.rows)
    if len(ranks) > 1 or len(context.job.groups) < 2 or ranks[0] not in group.lanes:
        return None
    lane = group.lanes[ranks[0]]
    if not len(lane.seqs) or lane.last + MAX_CALLS < blocked.seq:
        return None
    return find_skip_over_groups(context.job, group, ranks[0], waiter)


def _never_entered(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    destroyed = tuple(rank for rank in ranks if _destroyed_ns(context, blocked, rank))
    if destroyed:
        return _destroyed(context, blocked, destroyed)
    dead = {rank: text for rank in ranks if (text := death_of(context, blocked, rank))}
    if dead:
        return _died(context, blocked, dead)
    base, waiting = draft(context, blocked, ranks), waiting_text(context, blocked, ranks)
    subject = who(context.job, ranks)
    if all(not len(context.job.ranks[rank].trace.calls) for rank in ranks):
        sentence = (
            f"{subject} never came to {their(ranks)} first collective; {waiting} in {context.call(blocked)}"
        )
        base = replace(base, cause="not_started", sentence=sentence, confidence=0.85)
        return _still_in_init(base) if _all_inside(context, ranks, "init_process_group") else base
    if (telling := _telling(context, ranks)) is not None:
        return _stuck_elsewhere(base, context, ranks, telling, _entered(context, blocked), waiting)
    if context.job.ranks[ranks[0]].trace.progress.inside == "new_group":
        base = replace(
            base, advice=("make the same groups, with the same members, in the same order on every rank",)
        )
    alone = blocked.p2p is not None and blocked.p2p.number <= 1 and len(context.waiters_behind(ranks)) == 1
    at = context.place(blocked)
    sentence = f"{subject} never {_entered(context, blocked)}{f' ({at})' if at else ''}; {waiting}"
    return replace(
        base,
        cause="p2p_mismatch" if alone else "missing_rank",
        sentence=sentence + _last_seen(context, ranks),
        confidence=0.9 if blocked.p2p is None else 0.8,
        missing_evidence=(*base.missing_evidence, *_unrecorded(context, blocked, ranks)),
    )


def _all_inside(context: Context, ranks: tuple[int, ...], function: str) -> bool:
    return all(context.job.ranks[rank].trace.progress.inside == function for rank in ranks)


def _still_in_init(base: Finding) -> Finding:
    """Others have left init_process_group: these ranks wait for a rank that does not exist, or cannot reach one."""
    who_is = "it is" if len(base.ranks) == 1 else "they are"
    advice = "compare RANK, WORLD_SIZE, MASTER_ADDR and the arguments of init_process_group on all ranks, and check the network between them"
    sentence = f"{base.sentence}; {who_is} inside init_process_group"
    return replace(base, sentence=sentence, confidence=0.6, advice=(advice,))


def _telling(context: Context, ranks: tuple[int, ...]) -> RankNow | None:
    """The first stack of these ranks that shows where one of them is instead."""
    seen = (context.seen[rank] for rank in ranks if rank in context.seen)
    return next((n for n in seen if n.cause not in UNTELLING or (n.cause == "unknown" and n.where)), None)


def _last_seen(context: Context, ranks: tuple[int, ...]) -> str:
    """What is known of where a lacking rank went instead."""
    progress = context.job.ranks[ranks[0]].trace.progress
    if progress.closed:
        return f"; it has left the program ({one_line(progress.closed)})"
    if progress.inside:
        return f"; it is inside {progress.inside}"
    last = context.last_call(ranks[0]) if len(ranks) == 1 else ""
    return f"; its last call was {last}" if last else ""


def _destroyed_ns(context: Context, blocked: Blocked, rank: int) -> int:
    """When the rank called destroy_process_group on the group of the call; 0 when it did not, or ended of an error of its own."""
    trace, name = context.job.ranks[rank].trace, context.group(blocked).name
    if trace.progress.closed not in ("", "exit") and not is_secondary(trace.progress.closed):
        return 0
    return max((ns for index, ns in trace.destroyed.items() if trace.groups[index].name == name), default=0)


def _destroyed(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Ranks that made an end of the group while others still use it."""
    left = context.job.ranks[ranks[0]].trace.progress.closed == "exit"
    sentence = (
        f"{who(context.job, ranks)} called destroy_process_group on group {context.group(blocked).label} and never entered "
        f"{context.call(blocked)}; {waiting_text(context, blocked, ranks)}{'; it has left the program' if left else ''}"
    )
    advice = f"make {context.place(blocked) or 'this call'} before any rank destroys the group, or on no rank"
    return settled(draft(context, blocked, ranks), sentence, 0.93, advice)


def _entered(context: Context, blocked: Blocked) -> str:
    """What the lacking rank should have done: a receive is not entered by its sender."""
    wait = blocked.p2p
    if wait is None:
        return f"entered {context.call(blocked)}"
    return f"posted the {'receive' if wait.sends else 'send'} for rank {wait.rank}'s {context.call(blocked)}"


def left_out(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Ranks that went on without a call which they have always made at this point."""
    base = draft(context, blocked, ranks)
    at = context.place(blocked)
    last = context.last_call(ranks[0])
    sentence = (
        f"{who(context.job, ranks)} never entered {context.call(blocked)}{f' ({at})' if at else ''} but went on without it"
        f"{f', to {last}' if last and len(ranks) == 1 else ''}; {waiting_text(context, blocked, ranks)}"
    )
    evidence = f"in all earlier rounds {ranks_text(ranks)} made this call at this point"
    advice = f"look for a condition that lets {ranks_text(ranks)} pass {at or 'this call'}"
    return settled(replace(base, evidence=(*base.evidence, evidence)), sentence, 0.9, advice)


def _stuck_elsewhere(
    base: Finding, context: Context, ranks: tuple[int, ...], now: RankNow, entered: str, waiting: str
) -> Finding:
    at = f"; it is at {now.where}" if now.where else ""
    live: Stacks = (((now.rank,), now.stack),) if now.stack else ()
    advice = f"look at {now.where}: rank {now.rank} is there now" if now.where else base.advice[0]
    sentence = f"{who(context.job, ranks)} never {entered}; {waiting}{at}{doing(now.cause)}"
    return replace(
        settled(base, sentence, 0.95, advice, "stuck_before_collective"),
        where=now.where or base.where,
        evidence=(*base.evidence, *((now.evidence,) if now.evidence else ())),
        stacks=(*live, *base.stacks),
        stack_labels=(*("live" for _ in live), *base.stack_labels),
    )


def death_of(context: Context, blocked: Blocked, rank: int) -> str:
    """How a rank is known to have died, as a sentence part; "" when it is not."""
    now = context.seen.get(rank)
    progress = context.job.ranks[rank].trace.progress
    if progress.closed and progress.closed != "exit":
        return f"it ended with {one_line(progress.closed)}"
    if now is not None and now.cause == "gone" and progress.closed != "exit":
        return now.evidence or "its process is gone"
    if progress.closed == "exit" or not any(
        _failed_quickly(context, r, blocked.rows[r]) for r in blocked.failed
    ):
        return ""
    return QUICK_FAILURE


def _failed_quickly(context: Context, rank: int, row: int) -> bool:
    """Whether the call is known to have failed well before its timeout."""
    call = context.job.ranks[rank].trace.calls[row]
    if int(call["state"]) != State.FAILED or not int(call["completed_ns"]):
        return False
    took_ms = (int(call["completed_ns"]) - int(call["created_ns"])) / 1e6
    return int(call["timeout_ms"]) == 0 or took_ms < 0.8 * int(call["timeout_ms"])


def _died(context: Context, blocked: Blocked, dead: dict[int, str]) -> Finding:
    ranks = tuple(sorted(dead))
    before = f"before it {_entered(context, blocked)}"
    sentence = (
        f"{who(context.job, ranks)} died {before}: {dead[ranks[0]]}; {waiting_text(context, blocked, ranks)}"
    )
    line = line_in(dead[ranks[0]])
    advice = f"read the end of the log of {ranks_text(ranks)}, and `dmesg -T | grep -i kill` on its node"
    if line:
        advice = f"look at {line}, where rank {ranks[0]} ended"
    sure = 0.8 if dead[ranks[0]] == QUICK_FAILURE else 0.93
    return settled(draft(context, blocked, ranks), sentence, sure, advice, "rank_died")


def _one_against_all(context: Context, blocked: Blocked, group: GroupView, ranks: tuple[int, ...]) -> bool:
    """One rank waits in its single open call for two or more others, none of which is known to be anywhere."""
    if len(blocked.rows) != 1 or len(ranks) < 2 or set(ranks) != set(group.members) - set(blocked.rows):
        return False
    if any(rank in context.seen or not len(group.lanes[rank].seqs) for rank in ranks):
        return False
    lane = group.lanes[next(iter(blocked.rows))]
    return lane.last == blocked.seq and len({group.lanes[rank].last for rank in ranks}) == 1


def _lone_waiter(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    rank, row = next(iter(blocked.rows.items()))
    at = place(context.job.frames(rank, row))
    sentence = (
        f"{who(context.job, (rank,))} made an extra {context.call(blocked)}{f' at {at}' if at else ''}: none of the other "
        f"{len(ranks)} ranks entered it, and all of them stopped after the same call"
    )
    ask = f"where {ranks_text(ranks)} are now: `allranks stacks` tells whether they are stuck instead"
    return replace(
        draft(context, blocked, ranks),
        cause="extra_collective",
        ranks=(rank,),
        sentence=sentence,
        confidence=0.6,
        waiting=(rank,),
        where=at,
        missing_evidence=(ask,),
        stacks=context.stacks([(rank, row)]),
        stack_labels=(),
    )


def _unrecorded(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """What NCCL's own recorder cannot have seen, where several ranks lack together."""
    own = any(not is_box(context.job.ranks[rank].trace) for rank in ranks)
    if len(ranks) < 2 or not own or not context.group(blocked).backend.startswith("nccl"):
        return ()
    return (
        f"whether one of {ranks_text(ranks)} waits for another: the first send or receive between two ranks blocks "
        "before NCCL records it, and only their stacks tell which",
    )
