"""A rank that others wait for and that waits for nobody: never entered, stuck elsewhere, dead, or innocent after all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.align import is_box
from allranks.diagnose.context import Context, Stacks, latest_stack
from allranks.diagnose.divergence import Divergence, find_divergence, odd_one
from allranks.diagnose.explain_divergence import explain_divergence
from allranks.diagnose.job import GroupView, Lane, Now
from allranks.diagnose.ops import Family
from allranks.diagnose.p2p import P2PWait
from allranks.diagnose.phrasing import count_ranks, one_line, place, ranks_text, seconds, who
from allranks.diagnose.shift import Shift, find_stack_shift
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.trace import State

#: Causes of `allranks stacks` that say the rank is inside a call after all, or say nothing.
UNTELLING = frozenset({"", "unknown", "healthy", "collective_wait", "p2p_wait", "gone"})


def explain_ranks(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """The finding for ranks that all lack in the same blocked call."""
    group = context.group(blocked)
    if all(rank not in context.job.ranks for rank in ranks):
        return _no_dump(context, blocked, ranks)
    ranks = tuple(rank for rank in ranks if rank in context.job.ranks)
    if blocked.p2p is not None:
        crossed = wrong_peer(context, blocked)
        if crossed is not None:
            return crossed
    else:
        divergence = _by_steps(context, blocked, ranks)
        if divergence is not None:
            return explain_divergence(context, group, divergence, (divergence.rank,), None, blocked)
        shift = find_stack_shift(context.job, group)
        if shift is not None and shift.seq <= blocked.seq:
            return shifted(context, blocked, group, shift)
        if _one_against_all(context, blocked, group, ranks):
            return _lone_waiter(context, blocked, ranks)
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


def _never_entered(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    seen = [context.seen[rank] for rank in ranks if rank in context.seen]
    destroyed = tuple(rank for rank in ranks if _destroyed_ns(context, blocked, rank))
    if destroyed:
        return _destroyed(context, blocked, destroyed)
    dead = {rank: text for rank in ranks if (text := death_of(context, blocked, rank))}
    if dead:
        return _died(context, blocked, dead)
    base = _base(context, blocked, ranks)
    call, waiting = context.call(blocked), _waiting(context, blocked, ranks)
    if all(not len(context.job.ranks[rank].trace.calls) for rank in ranks):
        sentence = (
            f"{who(context.job, ranks)} never came to {_their(ranks)} first collective; {waiting} in {call}"
        )
        return replace(base, cause="not_started", sentence=sentence, confidence=0.85)
    telling = [now for now in seen if now.cause not in UNTELLING or (now.cause == "unknown" and now.where)]
    if telling:
        return _stuck_elsewhere(base, context, ranks, telling[0], _entered(context, blocked), waiting)
    cause = "missing_rank"
    if blocked.p2p is not None and blocked.p2p.number <= 1 and len(context.waiters_behind(ranks)) == 1:
        cause = "p2p_mismatch"
    last = context.last_call(ranks[0])
    closed = context.job.ranks[ranks[0]].trace.progress.closed
    tail = (
        f"; it has left the program ({closed})"
        if closed
        else f"; its last call was {last}"
        if last and len(ranks) == 1
        else ""
    )
    at = context.place(blocked)
    sentence = f"{who(context.job, ranks)} never {_entered(context, blocked)}{f' ({at})' if at else ''}; {waiting}{tail}"
    base = replace(base, missing_evidence=(*base.missing_evidence, *_unrecorded(context, blocked, ranks)))
    return replace(base, cause=cause, sentence=sentence, confidence=0.9 if blocked.p2p is None else 0.8)


def _destroyed_ns(context: Context, blocked: Blocked, rank: int) -> int:
    """When the rank called destroy_process_group on the group of the call; 0 when it did not, or ended otherwise."""
    trace, name = context.job.ranks[rank].trace, context.group(blocked).name
    if trace.progress.closed not in ("", "exit"):
        return 0
    return max((ns for index, ns in trace.destroyed.items() if trace.groups[index].name == name), default=0)


def _destroyed(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Ranks that made an end of the group while others still use it."""
    base, group = _base(context, blocked, ranks), context.group(blocked)
    left = context.job.ranks[ranks[0]].trace.progress.closed == "exit"
    sentence = (
        f"{who(context.job, ranks)} called destroy_process_group on group {group.label} and never entered {context.call(blocked)}; "
        f"{_waiting(context, blocked, ranks)}{'; it has left the program' if left else ''}"
    )
    at = context.place(blocked)
    return replace(base, sentence=sentence, confidence=0.93, missing_evidence=(),
                   advice=(f"make {at or 'this call'} before any rank destroys the group, or on no rank",))  # fmt: skip


def _entered(context: Context, blocked: Blocked) -> str:
    """What the lacking rank should have done: a receive is not entered by its sender."""
    wait = blocked.p2p
    if wait is None:
        return f"entered {context.call(blocked)}"
    return f"posted the {'receive' if wait.sends else 'send'} for rank {wait.rank}'s {context.call(blocked)}"


def left_out(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Ranks that went on without a call which they have always made at this point."""
    base = _base(context, blocked, ranks)
    at = context.place(blocked)
    last = context.last_call(ranks[0])
    sentence = (
        f"{who(context.job, ranks)} never entered {context.call(blocked)}{f' ({at})' if at else ''} but went on without it"
        f"{f', to {last}' if last and len(ranks) == 1 else ''}; {_waiting(context, blocked, ranks)}"
    )
    evidence = f"in all earlier rounds {ranks_text(ranks)} made this call at this point"
    return replace(base, sentence=sentence, evidence=(*base.evidence, evidence), missing_evidence=(),
                   advice=(f"look for a condition that lets {ranks_text(ranks)} pass {at or 'this call'}",))  # fmt: skip


def _stuck_elsewhere(
    base: Finding, context: Context, ranks: tuple[int, ...], now: RankNow, entered: str, waiting: str
) -> Finding:
    at = f"; it is at {now.where}" if now.where else ""
    word = f" ({now.cause.replace('_', ' ')})" if now.cause not in ("", "unknown") else ""
    sentence = f"{who(context.job, ranks)} never {entered}; {waiting}{at}{word}"
    live: Stacks = (((now.rank,), now.stack),) if now.stack else ()
    advice = (f"look at {now.where}: {ranks_text((now.rank,))} is there now",) if now.where else base.advice
    return replace(
        base, cause="stuck_before_collective", sentence=sentence, confidence=0.95, where=now.where or base.where,
        evidence=(*base.evidence, *((now.evidence,) if now.evidence else ())), missing_evidence=(), stacks=(*live, *base.stacks),
        stack_labels=(*("live" for _ in live), *base.stack_labels), advice=advice,
    )  # fmt: skip


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
    return "the others' calls failed long before their timeout, as they do when a peer is gone"


def _failed_quickly(context: Context, rank: int, row: int) -> bool:
    """Whether the call is known to have failed well before its timeout."""
    call = context.job.ranks[rank].trace.calls[row]
    if int(call["state"]) != State.FAILED or not int(call["completed_ns"]):
        return False
    took_ms = (int(call["completed_ns"]) - int(call["created_ns"])) / 1e6
    return int(call["timeout_ms"]) == 0 or took_ms < 0.8 * int(call["timeout_ms"])


def _died(context: Context, blocked: Blocked, dead: dict[int, str]) -> Finding:
    ranks = tuple(sorted(dead))
    base = _base(context, blocked, ranks)
    sentence = f"{who(context.job, ranks)} died before {context.call(blocked)}: {dead[ranks[0]]}; {_waiting(context, blocked, ranks)}"
    return replace(base, cause="rank_died", sentence=sentence, confidence=0.93, missing_evidence=(),
                   advice=(f"read the end of the log of {ranks_text(ranks)}, and `dmesg -T | grep -i kill` on its node",))  # fmt: skip


def _no_dump(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Members without a file. Usually dead; but gloo also kills the innocent partner of a wrong call."""
    group = context.group(blocked)
    odd = _aborted_partner(context, group, blocked)
    if odd is not None:
        return odd
    base = _base(context, blocked, ranks)
    few = len(ranks) * 2 > len(group.members) and len(ranks) > 2
    sentence = f"{ranks_text(ranks)} left no dump and never came out of {context.call(blocked)}; {_waiting(context, blocked, ranks)}"
    missing = (f"the black box, dump or log of {ranks_text(ranks)}: `allranks diagnose` with its file added",)
    return replace(
        base, cause="rank_died", sentence=sentence, confidence=0.3 if few else 0.75, where="",
        missing_evidence=missing, advice=(f"look for the last log lines of {ranks_text(ranks)} (killed, out of memory, node down)",),
    )  # fmt: skip


def _aborted_partner(context: Context, group: GroupView, blocked: Blocked) -> Finding | None:
    """One survivor of a gloo pair with one call unlike all others: gloo aborts the rank that gets more than it expects."""
    if group.backend != "gloo" or len(group.lanes) != 1 or len(group.members) != 2:
        return None
    lane = next(iter(group.lanes.values()))
    view = context.job.ranks[lane.rank]
    sig, now = view.sig[lane.rows], view.now[lane.rows]
    for at in range(len(sig) - 1, 0, -1):
        if int((sig == sig[at]).sum()) > 1 or now[at] == Now.DONE:
            continue
        behind = at + 1 < len(sig)
        if behind and sig[at - 1] == sig[at + 1]:
            return _killer(context, blocked, lane, at, "extra_collective")
        if not behind and _outgrew(context, lane, at):
            same_line = view.stack[lane.rows[at]] == view.stack[lane.rows[at - 1]]
            return _killer(
                context, blocked, lane, at, _changed(context, lane, at) if same_line else "extra_collective"
            )
    return None


def _outgrew(context: Context, lane: Lane, at: int) -> bool:
    """Whether the call gives more than the calls of its kind before it, of which the last two were alike."""
    view = context.job.ranks[lane.rank]
    before = [row for row in lane.rows[:at].tolist() if view.family[row] == view.family[lane.rows[at]]]
    if len(before) < 2 or view.sig[before[-1]] != view.sig[before[-2]]:
        return False
    return context.job.input_bytes(lane.rank, int(lane.rows[at])) > context.job.input_bytes(
        lane.rank, before[-1]
    )


def _changed(context: Context, lane: Lane, at: int) -> str:
    rows = [int(lane.rows[at - 1]), int(lane.rows[at])]
    elements = {int(context.job.ranks[lane.rank].trace.calls["in_numel"][row]) for row in rows}
    return "size_mismatch" if len(elements) > 1 else "dtype_mismatch"


def _killer(context: Context, blocked: Blocked, lane: Lane, at: int, cause: str) -> Finding:
    row, seq, group = int(lane.rows[at]), int(lane.seqs[at]), context.group(blocked)
    line = place(context.job.frames(lane.rank, row))
    other = [rank for rank in group.members if rank != lane.rank]
    what = "made an extra" if cause == "extra_collective" else "called"
    sentence = (
        f"rank {lane.rank} {what} {context.job.op(lane.rank, row)} #{seq} of group {group.label}{f' at {line}' if line else ''}, "
        f"unlike all its other calls; {ranks_text(other)} is gone, as gloo aborts a rank that gets more than it expects"
    )
    return replace(
        _base(context, blocked, (lane.rank,)), cause=cause, ranks=(lane.rank,), sequence=seq, where=line,
        sentence=sentence, confidence=0.6, waiting=(), stacks=context.stacks([(lane.rank, row)]), stack_labels=(),
        evidence=(f"#{seq} is the only call of its kind, and the other rank is gone since",),
        missing_evidence=(f"the log of {ranks_text(other)}: 'gloo::EnforceNotMet' confirms it, 'Killed' refutes it",),
        advice=(f"make the call at {line or 'that line'} on all ranks of the group, and with the same sizes",),
    )  # fmt: skip


def shifted(context: Context, blocked: Blocked | None, group: GroupView, shift: Shift) -> Finding:
    """An extra or a skipped call seen only in the stacks."""
    lane = group.lanes[shift.rank]
    usual = next(other for other in group.lanes.values() if other.rank != shift.rank and len(other.seqs))
    source = lane if shift.extra else usual
    row = source.row(shift.seq)
    op, at = context.job.op(source.rank, row), place(context.job.frames(source.rank, row))
    verb = "made an extra" if shift.extra else "skipped"
    sentence = f"{who(context.job, (shift.rank,))} {verb} {op} #{shift.seq} of group {group.label}{f' at {at}' if at else ''}"
    others = tuple(rank for rank in group.lanes if rank != shift.rank)
    sentence += f": moved by {shift.count}, its next {shift.agreeing} calls are at the same lines as those of {ranks_text(others)}"
    waiting: tuple[int, ...] = ()
    if blocked is not None:
        waiting = tuple(rank for rank in context.waiters_behind((-1 - blocked.index,)) if rank != shift.rank)
        sentence += f"; now {ranks_text(blocked.waiters)} wait{'s' if len(blocked.waiters) == 1 else ''} in {context.call(blocked)}"
    return Finding(
        "extra_collective" if shift.extra else "missing_rank", (shift.rank,), sentence, "root", group.label, shift.seq,
        min(0.95, 0.75 + 0.05 * shift.agreeing), at, waiting, context.waited(blocked) if blocked else None,
        context.stacks([(source.rank, row), *((o, group.lanes[o].row(shift.seq)) for o in others if group.lanes[o].row(shift.seq) >= 0)]),
        (f"the call sites of {ranks_text((shift.rank,))} and of the others part at #{shift.seq}",), (),
        (f"make the call at {at or 'that line'} on all ranks of the group, or on none",),
    )  # fmt: skip


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
    base = _base(context, blocked, ranks)
    at = place(context.job.frames(rank, row))
    sentence = (
        f"{who(context.job, (rank,))} made an extra {context.call(blocked)}{f' at {at}' if at else ''}: none of the other "
        f"{len(ranks)} ranks entered it, and all of them stopped after the same call"
    )
    return replace(
        base, cause="extra_collective", ranks=(rank,), sentence=sentence, confidence=0.6, waiting=(rank,), where=at,
        missing_evidence=(f"where {ranks_text(ranks)} are now: `allranks stacks` tells whether they are stuck instead",),
        stacks=context.stacks([(rank, row)]), stack_labels=(),
    )  # fmt: skip


def wrong_peer(context: Context, blocked: Blocked) -> Finding | None:
    """The waiter itself has the wrong partner: somebody else is waiting for exactly it."""
    wait = blocked.p2p
    assert wait is not None
    if _known_partner(context, wait):
        return None
    for other in context.blocked:
        o = other.p2p
        if (
            o is None
            or o.peer != wait.rank
            or o.rank in (wait.peer, wait.rank)
            or o.sends == wait.sends
            or o.partner >= 0
        ):
            continue
        return _other_partner(context, blocked, wait, o.rank, o.row)
    for rank in context.group(blocked).members:
        row = _unanswered(context, wait, rank) if rank not in (wait.rank, wait.peer) else -1
        if row >= 0:
            return _other_partner(context, blocked, wait, rank, row)
    return None


def _other_partner(context: Context, blocked: Blocked, wait: P2PWait, rank: int, row: int) -> Finding:
    """It is `rank` that has posted a message for the waiter, not the one it waits for."""
    verb = "receives from" if not wait.sends else "sends to"
    sentence = (
        f"{who(context.job, (wait.rank,))} {verb} rank {wait.peer}, but it is rank {rank} that "
        f"{'receives from' if wait.sends else 'sends to'} it (group {context.group(blocked).label})"
    )
    return replace(
        _base(context, blocked, (wait.peer,)), cause="p2p_mismatch", ranks=(wait.rank,), sentence=sentence, confidence=0.85,
        waiting=tuple(sorted({wait.rank, rank})), stacks=context.stacks([(wait.rank, wait.row), (rank, row)]),
        stack_labels=(), missing_evidence=(),
    )  # fmt: skip


def _unanswered(context: Context, wait: P2PWait, rank: int) -> int:
    """The row of a message that `rank` posted for the waiter, and for which the waiter posted nothing; -1 when there is none."""
    if rank not in context.job.ranks:
        return -1
    mine, theirs = context.job.ranks[wait.rank], context.job.ranks[rank]
    if any(int(view.trace.calls["begin"][0]) > 1 for view in (mine, theirs) if len(view.trace.calls)):
        return -1
    calls = mine.trace.calls
    posted = (calls["peer"] == rank) & (mine.family == mine.family[wait.row]) & (mine.group == wait.group)
    family = int(Family.RECV if wait.sends else Family.SEND)
    offered = (
        (theirs.trace.calls["peer"] == wait.rank) & (theirs.family == family) & (theirs.group == wait.group)
    )
    rows = np.flatnonzero(offered)
    return int(rows[-1]) if len(rows) > int(posted.sum()) else -1


def _known_partner(context: Context, wait: P2PWait) -> bool:
    """Whether the two have exchanged a message in this direction before: then the partner is the right one."""
    view = context.job.ranks[wait.rank]
    calls = view.trace.calls[: wait.row]
    same = (calls["peer"] == wait.peer) & (view.group[: wait.row] == wait.group)
    return bool((same & (view.family[: wait.row] == view.family[wait.row])).any())


def _base(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """What all findings about absent ranks have in common."""
    latest = [(rank, *latest_stack(context, rank)) for rank in ranks[:4]]
    own = tuple(((rank,), frames) for rank, frames, _ in latest if frames)
    waiters = context.stacks(blocked.rows.items())
    labels = (*(label for _, frames, label in latest if frames), *("in this call" for _ in waiters))
    at = context.place(blocked)
    evidence = [f"{ranks_text(blocked.waiters)} entered {context.call(blocked)}{f' at {at}' if at else ''}"
                + (f" and {seconds(w)} later had not left it" if (w := context.waited(blocked)) is not None and not blocked.failed else "")]  # fmt: skip
    if failure := context.failure(blocked):
        evidence.append(failure)
    for rank in ranks[:4]:
        last = context.last_call(rank)
        if last:
            evidence.append(f"the last call of rank {rank} was {last}")
    return Finding(
        "missing_rank", ranks, "", "root", context.group(blocked).label,
        blocked.seq if blocked.seq >= 0 else None, 0.9, at, context.waiters_behind(ranks), context.waited(blocked),
        (*own, *waiters), tuple(evidence),
        tuple(_where_now(context, r) for r in ranks[:2] if r in context.job.ranks and not context.job.ended),
        (f"look at what {ranks_text(ranks)} {'does' if len(ranks) == 1 else 'do'} between {_their(ranks)} last call "
         f"and {at or context.call(blocked)}",), labels,
    )  # fmt: skip


def _where_now(context: Context, rank: int) -> str:
    header = context.job.ranks[rank].trace.header
    on = f" on {header.host}" if header.host else " on its node"
    pid = f" --pid {header.pid}" if header.pid else ""
    return f"where rank {rank} is now: run `allranks stacks{pid}`{on}"


def _unrecorded(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """What NCCL's own recorder cannot have seen, where several ranks lack together."""
    own = any(not is_box(context.job.ranks[rank].trace) for rank in ranks)
    if len(ranks) < 2 or not own or not context.group(blocked).backend.startswith("nccl"):
        return ()
    return (
        f"whether one of {ranks_text(ranks)} waits for another: the first send or receive between two ranks blocks "
        "before NCCL records it, and only their stacks tell which",
    )


def _waiting(context: Context, blocked: Blocked, guilty: tuple[int, ...]) -> str:
    """ "7 ranks have waited 31 s": all that wait for the guilty, directly or not, as long as the first of them."""
    behind = (set(context.waiters_behind(guilty)) | set(blocked.waiters)) - set(guilty)
    number = len(behind)
    verb = "has" if number == 1 else "have"
    failed = [rank for rank, row in blocked.rows.items() if context.job.ranks[rank].now[row] == Now.FAILED]
    if blocked.rows and len(failed) == len(blocked.rows) and blocked.p2p is None:
        return context.failure(blocked)
    wait = context.waited(blocked)
    text = f"{count_ranks(number)} {verb} waited {seconds(wait)}" if wait is not None else ""
    return text or f"{count_ranks(number)} wait{'s' if number == 1 else ''} for it"


def _their(ranks: tuple[int, ...]) -> str:
    return "its" if len(ranks) == 1 else "their"
