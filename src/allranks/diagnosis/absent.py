"""A rank that others wait for and that waits for nobody: never entered, stuck elsewhere, dead, without a file, or innocent
after all."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from allranks.diagnosis.alignment import (
    MAX_CALLS,
    CallDifference,
    find_shift,
    find_skip_over_groups,
    step_keys,
    usual_next,
)
from allranks.diagnosis.context import (
    Context,
    Stacks,
    doing,
    is_secondary,
    latest_stack,
    line_in,
    place,
    polls,
)
from allranks.diagnosis.job import Family, GroupView, Lane, Now, is_p2p
from allranks.diagnosis.kinds import say
from allranks.diagnosis.match import sizes_text
from allranks.diagnosis.mismatches import left_program
from allranks.diagnosis.p2p import P2PWait
from allranks.diagnosis.waits import Blocked
from allranks.model.diagnosis import FileNote, Finding, RankNow
from allranks.model.formatting import one_line, ranks_text
from allranks.model.trace import State

ENDING_S = 5.0  # what a rank may take to end when it is interrupted
#: Causes of `allranks stacks` that say the rank is inside a call after all, or say nothing.
UNTELLING = frozenset({"", "unknown", "healthy", "collective_wait", "p2p_wait", "gone"})
TIE = 0.55  # one rank waits, and which one is odd depends on a file that is missing
UNREAD = "unread"  # as the cause of a RankNow: the rank has a file that could not be read


def explain_ranks(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """The finding for ranks that all lack in the same blocked call."""
    group = context.group(blocked)
    crossed = wrong_peer(context, blocked) if blocked.p2p is not None else None
    if crossed is not None:
        return crossed
    if all(rank not in context.job.ranks for rank in ranks):
        return _without_file(context, blocked, ranks)
    ranks = tuple(rank for rank in ranks if rank in context.job.ranks)
    if blocked.p2p is None:
        shift = find_shift(context.job, group)
        if shift is not None and shift.seq <= blocked.seq:
            return left_program(context, group, shift, blocked)
        if _one_against_all(context, blocked, group, ranks):
            return _lone_waiter(context, blocked, ranks)
        if (skip := _over_groups(context, blocked, ranks)) is not None:
            return left_program(context, group, skip, blocked)
    return _unless_alone(context, blocked, _never_entered(context, blocked, ranks))


def _unless_alone(context: Context, blocked: Blocked, found: Finding) -> Finding:
    """The finding, less sure where one rank waits in a call that perhaps only it makes, and a file that would show it is missing."""
    wait, views = blocked.p2p, context.job.ranks
    lost = tuple(r for r in context.group(blocked).members if r not in views or views[r].cut)
    rank, row = min(blocked.rows.items())
    keys = step_keys(context.job.ranks[rank])
    new = wait is not None or len(found.ranks) > 1 or not (keys[usual_next(keys, row)] == keys[row]).any()
    if found.kind != "never_entered" or len(blocked.rows) > 1 or not new or not lost:
        return found
    if wait is not None and _known_partner(context, wait):
        return found
    asked = (*found.missing_evidence, say("file_of", ranks=ranks_text(lost)))
    return replace(found, confidence=min(TIE, found.confidence), missing_evidence=asked)


def lacking(
    context: Context,
    kind: str,
    blocked: Blocked,
    ranks: tuple[int, ...],
    sure: float = 0.0,
    cause: str = "",
    /,
    **facts: object,
) -> Finding:
    """A finding about ranks that lack in a call: with the stacks of their latest calls, and of those who wait."""
    latest = [(rank, *latest_stack(context, rank)) for rank in ranks[:4]]
    known = [(rank, frames, label) for rank, frames, label in latest if frames]
    waiters = context.stacks(blocked.rows.items())
    return replace(
        context.root(kind, ranks, blocked, sure, cause, **facts),
        stacks=(*(((rank,), frames) for rank, frames, _ in known), *waiters),
        stack_labels=(*(label for _, _, label in known), *("in this call" for _ in waiters)),
    )


def _over_groups(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> CallDifference | None:
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
        left = context.job.ranks[destroyed[0]].trace.progress.closed == "exit"
        return lacking(context, "destroyed", blocked, destroyed, left=left)
    dead = {rank: text for rank in ranks if (text := death_of(context, blocked, rank))}
    if dead:
        return _died(context, blocked, dead)
    marks = [context.job.ranks[rank].trace.progress for rank in ranks]
    if all(not len(context.job.ranks[rank].trace.calls) for rank in ranks):
        inside = all(progress.inside == "init_process_group" for progress in marks)
        return lacking(context, "in_init" if inside else "not_started", blocked, ranks)
    if (now := _telling(context, ranks)) is not None:
        return _stuck_elsewhere(context, blocked, ranks, now)
    message = blocked.p2p is not None
    alone = blocked.p2p is not None and blocked.p2p.number <= 1 and len(context.waiters_behind(ranks)) == 1
    return lacking(
        context,
        "never_entered",
        blocked,
        ranks,
        0.8 if message else 0.9,
        "p2p_mismatch" if alone else "",
        closed=one_line(marks[0].closed),
        inside=marks[0].inside,
        in_new_group=marks[0].inside == "new_group",
        passed=message and context.first_open(ranks[0]) >= 0,
        message="" if blocked.p2p is None else "receive" if blocked.p2p.sends else "send",
        unrecorded=_unrecorded(context, blocked, ranks),
    )


def _telling(context: Context, ranks: tuple[int, ...]) -> RankNow | None:
    """The first stack of these ranks that shows where one of them is instead."""
    seen = (context.seen[rank] for rank in ranks if rank in context.seen)
    return next((n for n in seen if n.cause not in UNTELLING or (n.cause == "unknown" and n.where)), None)


def _destroyed_ns(context: Context, blocked: Blocked, rank: int) -> int:
    """When the rank called destroy_process_group on the group of the call; 0 when it did not, or ended of an error of its own."""
    trace, name = context.job.ranks[rank].trace, context.group(blocked).name
    if trace.progress.closed not in ("", "exit") and not is_secondary(trace.progress.closed):
        return 0
    return max((ns for index, ns in trace.destroyed.items() if trace.groups[index].name == name), default=0)


def _stuck_elsewhere(context: Context, blocked: Blocked, ranks: tuple[int, ...], now: RankNow) -> Finding:
    live: Stacks = (((now.rank,), now.stack),) if now.stack else ()
    facts = {"now_at": now.where, "now_rank": now.rank, "now_evidence": now.line, **doing(now)}
    facts["there"] = "it" if len(ranks) == 1 else f"rank {now.rank}"
    exiting = now.evidence.startswith("the interpreter is exiting")  # threads of the program keep the process
    sure, cause = 0.75 if polls(now) else 0.0, ""
    # when the job was stopped: only the calls of the others tell how long it had been there
    if now.cause == "interrupted":
        sure, cause = 0.35 if _broke_soon(context, blocked) else 0.9, "missing_rank"
    found = lacking(
        context,
        "stuck_elsewhere",
        blocked,
        ranks,
        sure,
        cause,
        holder=str(now.held_by) if now.held_by in blocked.rows else "",
        exiting=exiting,
        polls=polls(now),
        **facts,
    )
    labels = (*("live" for _ in live), *found.stack_labels)
    return replace(found, where=now.where or found.where, stacks=(*live, *found.stacks), stack_labels=labels)


def _broke_soon(context: Context, blocked: Blocked) -> bool:
    """Whether all that waited in the call lost it within a usual pause: the job may have trained until it was stopped."""
    calls = [context.job.ranks[rank].trace.calls[row] for rank, row in blocked.rows.items()]
    took = [(int(call["completed_ns"]) - int(call["created_ns"])) / 1e9 for call in calls]
    limit_s = max(context.patience.limit_s, ENDING_S)
    return set(blocked.failed) >= set(blocked.rows) and max(took, default=0.0) < limit_s


def death_of(context: Context, blocked: Blocked, rank: int) -> str:
    """How a rank is known to have died, as a sentence part; "" when it is not."""
    now, closed = context.seen.get(rank), context.job.ranks[rank].trace.progress.closed
    if closed and closed != "exit":
        return say("ended_with", text=one_line(closed))
    if now is not None and now.cause == "gone" and closed != "exit":
        return now.evidence or say("gone")
    if now is not None and now.cause == "interrupted":  # by the user, and so were the calls of the others
        return ""
    quick = any(_failed_quickly(context, r, blocked.rows[r]) for r in blocked.failed)
    return say("quick_failure") if quick and closed != "exit" else ""


def _failed_quickly(context: Context, rank: int, row: int) -> bool:
    """Whether the call is known to have failed well before its timeout."""
    call = context.job.ranks[rank].trace.calls[row]
    if int(call["state"]) != State.FAILED or not int(call["completed_ns"]):
        return False
    took_ms = (int(call["completed_ns"]) - int(call["created_ns"])) / 1e6
    return int(call["timeout_ms"]) == 0 or took_ms < 0.8 * int(call["timeout_ms"])


def _died(context: Context, blocked: Blocked, dead: dict[int, str]) -> Finding:
    ranks = tuple(sorted(dead))
    how = dead[ranks[0]]
    sure = 0.8 if how == say("quick_failure") else 0.93
    now = context.seen.get(ranks[0])
    facts: dict[str, object] = {"how": how, "line": line_in(how)}
    if now is None or now.cause in UNTELLING or not now.where:  # else it hangs in its end
        return lacking(context, "died", blocked, ranks, sure, **facts)
    facts |= {"now_at": now.where, "now_evidence": now.line, **doing(now)}
    return lacking(context, "died", blocked, ranks, sure, **facts)


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
    at, others = place(context.job.frames(rank, row)), ranks_text(ranks)
    found = context.root(
        "lone_waiter",
        (rank,),
        blocked,
        at=at,
        number=len(ranks),
        others=others,
        lasts=context.last_calls(ranks),
    )
    return replace(found, waiting=(rank,), where=at, stacks=context.stacks([(rank, row)]))


def _unrecorded(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> str:
    """What NCCL's own recorder cannot have seen, where several ranks lack together."""
    own = any(not context.job.ranks[rank].trace.is_box for rank in ranks)
    if len(ranks) < 2 or not own or not context.group(blocked).backend.startswith("nccl"):
        return ""
    return say("unrecorded", ranks=ranks_text(ranks))


def wrong_peer(context: Context, blocked: Blocked) -> Finding | None:
    """The waiter itself has the wrong partner: somebody else is waiting for exactly it."""
    wait = blocked.p2p
    assert wait is not None
    if wait.peer < 0 or _known_partner(context, wait):
        return None
    for other in (call.p2p for call in context.blocked):
        if other is None or other.partner >= 0 or other.peer != wait.rank or other.sends == wait.sends:
            continue
        if other.rank not in (wait.peer, wait.rank):
            return _other_partner(context, blocked, wait, other.rank, other.row)
    for rank in context.group(blocked).members:
        row = _unanswered(context, wait, rank) if rank not in (wait.rank, wait.peer) else -1
        if row >= 0:
            return _other_partner(context, blocked, wait, rank, row)
    return None


def _other_partner(context: Context, blocked: Blocked, wait: P2PWait, rank: int, row: int) -> Finding:
    """It is `rank` that has posted a message for the waiter, not the one it waits for."""
    last = context.last_calls((wait.peer,))
    facts = {"sends": wait.sends, "peer": str(wait.peer), "other": str(rank), "lasts": last}
    found = context.root("wrong_peer", (wait.rank,), blocked, **facts)
    both = tuple(sorted({wait.rank, rank}))
    return replace(found, waiting=both, stacks=context.stacks([(wait.rank, wait.row), (rank, row)]))


def _unanswered(context: Context, wait: P2PWait, rank: int) -> int:
    """The row of a message that `rank` posted for the waiter, and for which the waiter posted nothing; -1 when there is none."""
    if rank not in context.job.ranks:
        return -1
    mine, theirs = context.job.ranks[wait.rank], context.job.ranks[rank]
    if any(int(view.trace.calls["begin"][0]) > 1 for view in (mine, theirs) if len(view.trace.calls)):
        return -1
    calls, offers = mine.trace.calls, theirs.trace.calls
    posted = (calls["peer"] == rank) & (mine.family == mine.family[wait.row]) & (mine.group == wait.group)
    family = int(Family.RECV if wait.sends else Family.SEND)
    offered = (offers["peer"] == wait.rank) & (theirs.family == family) & (theirs.group == wait.group)
    rows = np.flatnonzero(offered)
    return int(rows[-1]) if len(rows) > int(posted.sum()) else -1


def _known_partner(context: Context, wait: P2PWait) -> bool:
    """Whether the two have exchanged a message in this direction before: then the partner is the right one."""
    view = context.job.ranks[wait.rank]
    calls = view.trace.calls[: wait.row]
    same = (calls["peer"] == wait.peer) & (view.group[: wait.row] == wait.group)
    return bool((same & (view.family[: wait.row] == view.family[wait.row])).any())


def _without_file(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Members without a file: dead, or only not among the files. gloo also kills the innocent partner of a wrong call."""
    group = context.group(blocked)
    odd = _aborted_partner(context, group, blocked) or _left_its_round(context, ranks)
    if odd is not None:
        return odd
    known = [now for rank in ranks if (now := context.seen.get(rank)) is not None]
    unread = [now.evidence for now in known if now.cause == UNREAD]
    if len(unread) == len(ranks):  # they may be inside the call like the others
        return lacking(context, "unread", blocked, ranks, problem=unread[0], problems="\n".join(unread))
    seen = [now for now in known if now.cause == "gone"]
    if not seen and all(context.job.ranks[rank].trace.is_hook for rank in blocked.rows):
        return lacking(context, "did_not_dump", blocked, ranks, it="it" if len(ranks) == 1 else "them")
    many = len(ranks) * 2 > len(group.members) and len(ranks) > 2
    several = len(ranks) > 1  # each of them may be another's victim, or only not collected
    # A black box survives its process: one that is missing was more likely not collected.
    boxes = all(context.job.ranks[rank].trace.is_box for rank in blocked.rows)
    sure = 0.9 if seen else 0.3 if many else 0.45 if boxes or several else 0.6
    missing = ranks_text(blocked.missing) if blocked.missing else ""
    how = seen[0].evidence if seen else ""
    return replace(lacking(context, "no_file", blocked, ranks, sure, how=how, missing=missing), where="")


def unread_ranks(files: Sequence[FileNote], there: Container[int | None]) -> dict[int, RankNow]:
    """Ranks that have a file of which nothing could be read: that says nothing of the rank."""
    found = {}
    for note in files:
        if note.status in ("damaged", "unreadable") and note.rank is not None and note.rank not in there:
            facts = {"rank": note.rank, "path": note.path, "note": note.note}
            text = say("unread_file", damaged=note.status == "damaged", **facts)
            found[note.rank] = RankNow(note.rank, UNREAD, "", text)
    return found


def _left_its_round(context: Context, ranks: tuple[int, ...]) -> Finding | None:
    """The one rank among those with a file that, before it came to wait, left out a call which it had always made."""
    broken, job = context.left_round, context.job
    if len(broken) != 1:
        return None
    rank, usual = next(iter(broken.items()))
    row = context.first_open(rank)
    if row < 0 or not _kept_by_another(context, rank, usual):
        return None
    blocked = next(b for b in context.blocked if b.rows.get(rank) == row)
    cause, what = _difference(context, rank, row, usual)
    at, line = place(job.frames(rank, usual)), place(job.frames(rank, row))
    skipped = cause == "missing_rank" or bool(is_p2p(job.ranks[rank].family[[usual]])[0])
    facts = {"line": line, "difference": what, "absent": ranks_text(ranks), "skipped": skipped, "usual": at}
    found = lacking(context, "left_its_round", blocked, (rank,), 0.0, cause, **facts)
    return replace(found, where=at if skipped else line)


def _kept_by_another(context: Context, rank: int, usual: int) -> bool:
    """Whether another rank made the call that this one has always made here, or waits where it should be or where it is: without
    one, perhaps all of them left the round. Of a message the other end is another call; a line tells of itself what was passed before."""
    view, row = context.job.ranks[rank], context.first_open(rank)
    others = [(context.job.ranks[each], context.first_open(each)) for each in context.waiting_but((rank,))]
    if is_p2p(view.family[[usual]])[0]:
        return len(others) > 0
    lines = {int(view.stack[usual]), int(view.stack[row])}
    here, usually = (place(context.job.frames(rank, at)) for at in (row, usual))
    if here == usually or any(int(other.stack[at]) in lines for other, at in others):
        return True
    made = [int((each.stack[: at + 1] == view.stack[usual]).sum()) for each, at in [(view, row), *others]]
    return max(made) > made[0] and not context.forgetful(context.job.ranks)


def _difference(context: Context, rank: int, row: int, usual: int) -> tuple[str, str]:
    """(cause, sentence part): how the call of a rank differs from the one that it has always made at this point."""
    job, view = context.job, context.job.ranks[rank]
    ops, at = (job.op(rank, row), job.op(rank, usual)), place(job.frames(rank, usual))
    before = say("usual_call", op=ops[1], at=at)
    if is_p2p(view.family[[row, usual]]).any():
        return "p2p_mismatch", before
    if ops[0] != ops[1] and at and at == place(job.frames(rank, row)):
        return "type_mismatch", before
    if view.stack[row] == view.stack[usual] and view.stack[row]:
        cause = _changed(context, rank, usual, row)
        shapes = [job.shapes(rank, at) for at in (row, usual)]
        now, then = [
            sizes_text(s.inputs) if cause == "size_mismatch" else "/".join(s.input_dtypes) for s in shapes
        ]
        return cause, say("usual_arguments", now=now, before=then) if now != then else say(
            "unusual_arguments"
        )
    known = bool((step_keys(view)[:row] == step_keys(view)[row]).any())
    return "missing_rank" if known else "extra_collective", before


def _aborted_partner(context: Context, group: GroupView, blocked: Blocked) -> Finding | None:
    """One survivor of a gloo pair with one call unlike all others: gloo aborts the rank that gets more than it expects."""
    if group.backend != "gloo" or len(group.lanes) != 1 or len(group.members) != 2:
        return None
    lane = next(iter(group.lanes.values()))
    gone = next(rank for rank in group.members if rank != lane.rank)
    log = context.seen[gone].evidence if gone in context.seen else ""
    if log and "gloo::EnforceNotMet" not in log:
        return None  # it is known to have ended otherwise
    view = context.job.ranks[lane.rank]
    sig, now = view.sig[lane.rows], view.now[lane.rows]
    for at in range(len(sig) - 1, 0, -1):
        if int((sig == sig[at]).sum()) > 1 or now[at] == Now.DONE:
            continue
        behind = at + 1 < len(sig)
        if (behind and sig[at - 1] == sig[at + 1]) or (not behind and _outgrew(context, lane, at)):
            return _aborted(context, blocked, lane, at, gone, log)
    return None


def _outgrew(context: Context, lane: Lane, at: int) -> bool:
    """Whether the call gives more than the calls of its kind before it, of which the last two were alike."""
    view, job = context.job.ranks[lane.rank], context.job
    before = [row for row in lane.rows[:at].tolist() if view.family[row] == view.family[lane.rows[at]]]
    if len(before) < 2 or view.sig[before[-1]] != view.sig[before[-2]]:
        return False
    return job.input_bytes(lane.rank, int(lane.rows[at])) > job.input_bytes(lane.rank, before[-1])


def _aborted(context: Context, blocked: Blocked, lane: Lane, at: int, gone: int, log: str) -> Finding:
    """The survivor's call unlike all others: one of its line was made before with other arguments, or it is extra."""
    row, seq, stacks = int(lane.rows[at]), int(lane.seqs[at]), context.job.ranks[lane.rank].stack
    alike = np.flatnonzero(stacks[lane.rows[:at]] == stacks[row])
    extra = not len(alike) or not stacks[row]
    cause = "extra_collective" if extra else _changed(context, lane.rank, int(lane.rows[alike[-1]]), row)
    line = place(context.job.frames(lane.rank, row))
    facts = {"extra": extra, "op": context.job.op(lane.rank, row), "seq": seq, "line": line, "log": log}
    found = context.root(
        "aborted_its_partner",
        (lane.rank,),
        blocked,
        0.85 if log else 0.6,
        cause,
        other=f"rank {gone}",
        **facts,
    )
    return replace(found, sequence=seq, where=line, waiting=(), stacks=context.stacks([(lane.rank, row)]))


def _changed(context: Context, rank: int, before: int, row: int) -> str:
    """How two calls of one operation differ."""
    job, calls = context.job, context.job.ranks[rank].trace.calls
    one, two = job.shapes(rank, before), job.shapes(rank, row)
    for column, cause in (("root", "root_mismatch"), ("reduce_op", "reduce_op_mismatch")):
        if one == two and calls[column][before] != calls[column][row]:
            return cause
    sizes = {
        (int(calls["in_numel"][at]), int(calls["out_numel"][at]), s.input_splits, s.output_splits)
        for at, s in ((before, one), (row, two))
    }
    return "size_mismatch" if len(sizes) > 1 or one.input_dtypes == two.input_dtypes else "dtype_mismatch"
