"""A call that everybody entered and that still did not end: failed on some, died inside, or nobody's program's fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnosis.context import Context, call_text, is_secondary, place, ranks_wait, who
from allranks.diagnosis.cycles import find_short_round
from allranks.diagnosis.job import ROOTED, Family, Now
from allranks.diagnosis.kinds import say
from allranks.diagnosis.match import known_inside
from allranks.diagnosis.waits import Blocked, has_unseen_members
from allranks.model.diagnosis import Finding
from allranks.model.formatting import one_line, ranks_text
from allranks.model.trace import Flag, State


def explain_alone(context: Context, every: list[Blocked]) -> Finding | None:
    """The first unfinished call of the only rank with a dump, of a group whose members that dump does not name: nobody can be
    blamed, however long it has lasted, and nothing is known to be right."""
    ((rank, view),) = context.job.ranks.items()
    if view.trace.is_box or context.seen or any(context.group(b).members_known for b in every):
        return None
    blocked = min(every, key=lambda one: one.rows[rank])
    return _finding(context, "alone", blocked, (), who=who(context.job, (rank,)))


def explain_call(context: Context, blocked: Blocked) -> Finding | None:
    """The finding for a blocked call that lacks nobody; None when it merely has not finished yet."""
    if has_unseen_members(context.job, blocked):
        return _finding(context, "alone", blocked, (), who=who(context.job, blocked.waiters))
    if blocked.unsure:
        return _finding(context, "unsure", blocked, blocked.unsure, many=len(blocked.unsure) > 1)
    if (ended := _ended_inside(context, blocked)) is not None:
        return ended
    failed = _ended_as(State.FAILED, context, blocked)
    if failed and len(failed) < len(blocked.rows):
        waiting = ranks_wait(rank for rank in blocked.rows if rank not in failed)
        return _finding(context, "failed_on_some", blocked, failed, others_wait=waiting)
    if failed and not _ended_as(State.TIMED_OUT, context, blocked):
        number = len(blocked.rows) if len(blocked.rows) > 1 else ""
        return _finding(context, "failed_on_all", blocked, _first_to_fail(context, blocked), number=number)
    short = find_short_round(context, blocked)
    return short or (_some_left(context, blocked) if blocked.passed else _none_finished(context, blocked))


def find_survived(context: Context) -> Finding | None:
    """A call that raised in one rank alone, whose program went on to later calls: those meet the others' in the wrong order."""
    found = []
    for rank, view in context.job.ranks.items() if context.blocked else ():
        number, text = view.trace.progress.first_error
        row = int(np.searchsorted(view.trace.calls["begin"], number)) if number else len(view.trace.calls)
        if row < len(view.trace.calls) and int(view.trace.calls["begin"][row]) == number:
            found.append((int(view.trace.calls["completed_ns"][row]), rank, row, text))
    own = [one for one in found if not is_secondary(one[3])]
    if not own or min(found) != min(own) or not _went_on(context, *min(own)[1:]):
        return None
    _, rank, row, text = min(own)
    view = context.job.ranks[rank]
    group, seq = context.job.groups[int(view.group[row])], int(view.trace.calls["seq"][row])
    same = [r for _, r, at, _ in own if int(context.job.ranks[r].trace.calls["seq"][at]) == seq]
    stuck = [b for b in context.blocked if b.group == group.index and b.seq >= seq > 0]
    if not stuck or len(same) > 1:
        return None
    at = place(context.job.frames(rank, row))
    call = call_text(context.job, rank, row, seq, group.label)
    here = any(blocked.seq == seq for blocked in stuck)
    facts = {"failed": call, "error": one_line(text), "line": at, "here": here}
    return replace(
        context.root("survived", (rank,), stuck[0], **facts),
        sequence=seq,
        where=at,
        waiting=tuple(r for r in group.members if r != rank and r in context.job.ranks),
        stacks=context.stacks([(rank, row)]),
        met_another=True,
    )


def _went_on(context: Context, rank: int, row: int, text: str) -> bool:
    """Whether the rank made calls after one had raised, and did not end of what it raised."""
    trace = context.job.ranks[rank].trace
    later = bool((trace.calls["created_ns"][row + 1 :] > trace.calls["completed_ns"][row]).any())
    return later and one_line(text.partition(": ")[2]) not in (trace.progress.closed or text)


def _ended_inside(context: Context, blocked: Blocked) -> Finding | None:
    """Ranks that died with the call unfinished, or left the program."""
    dead = {rank: text for rank in blocked.rows if (text := _died_inside(context, blocked, rank))}
    if dead:
        # Who ended because another rank was gone is not the one to look at.
        own = [rank for rank, text in dead.items() if not is_secondary(text)]
        ranks = tuple(sorted(own or dead))
        return _finding(context, "died_inside", blocked, ranks, how=dead[ranks[0]])
    left = tuple(r for r in blocked.waiters if context.job.ranks[r].trace.progress.closed == "exit")
    others = context.waiting_but(left)
    if not left or not others or context.job.ended:
        return None
    return _finding(context, "left_inside", blocked, left, others_wait=ranks_wait(others))


def _ended_as(state: State, context: Context, blocked: Blocked) -> tuple[int, ...]:
    states = {r: int(context.job.ranks[r].trace.calls["state"][blocked.rows[r]]) for r in blocked.failed}
    return tuple(rank for rank, found in states.items() if found == state)


def _died_inside(context: Context, blocked: Blocked, rank: int) -> str:
    """How a rank is known to have died in a call that others saw fail; "" when it is not."""
    closed, now = context.job.ranks[rank].trace.progress.closed, context.seen.get(rank)
    if now is not None and now.cause == "gone" and not closed:
        return now.evidence or say("gone")
    if rank in blocked.failed:
        return ""
    if closed and closed != "exit":
        return say("ended_with", text=one_line(closed))
    failed = _ended_as(State.FAILED, context, blocked)
    return say("others_failed") if len(failed) >= len(blocked.rows) - 1 and len(failed) > 1 else ""


def _first_to_fail(context: Context, blocked: Blocked) -> tuple[int, ...]:
    ends = {r: int(context.job.ranks[r].trace.calls["completed_ns"][row]) for r, row in blocked.rows.items()}
    known = {rank: ns for rank, ns in ends.items() if ns}
    return (min(known, key=lambda rank: (known[rank], rank)),) if known else tuple(sorted(ends))


def _some_left(context: Context, blocked: Blocked) -> Finding | None:
    """Some got out, some did not: an unfinished end, unless the operation has a root that they may disagree on."""
    lanes, (rank, row) = context.group(blocked).lanes, min(blocked.rows.items())
    certain = any(_state(context, blocked, rank) == Now.DONE for rank in blocked.passed)
    went_on = any(lanes[r].last > blocked.seq for r in blocked.passed if r in lanes)
    wait = context.waited(blocked)
    lasting = wait is not None and wait >= context.patience.limit_s
    view = context.job.ranks[rank]
    unknown = view.trace.is_hook and int(view.trace.calls["root"][row]) < 0
    if int(view.family[row]) in ROOTED and (went_on or lasting) and (unknown or not certain):
        return _root_guess(context, blocked)
    if wait is None:
        told = went_on and certain and not context.job.ended
        return _finding(context, "maybe_older", blocked, blocked.waiters) if told else None
    return (
        _finding(context, "some_left", blocked, blocked.waiters) if lasting and (went_on or certain) else None
    )


def _state(context: Context, blocked: Blocked, rank: int) -> int:
    lane = context.group(blocked).lanes.get(rank)
    row = lane.row(blocked.seq) if lane is not None else -1
    return int(context.job.ranks[rank].now[row]) if row >= 0 else Now.UNKNOWN


def _root_guess(context: Context, blocked: Blocked) -> Finding:
    """A rooted call that ended on some ranks and hangs on others: they disagree on the root."""
    group = context.group(blocked)
    rows = {rank: lane.row(blocked.seq) for rank, lane in group.lanes.items() if lane.row(blocked.seq) >= 0}
    stacks = context.stacks(rows.items())
    odd: set[int] = set(blocked.waiters)
    if len(stacks) > 1 and len(stacks[0][0]) > len(stacks[1][0]):
        elsewhere = {rank for ranks, _ in stacks[1:] for rank in ranks}
        odd = (odd & elsewhere) or odd
    # A tree is sent down from low to high ranks when rank 0 is the root, as it mostly is: the sender is innocent.
    certain = len(odd) == 1
    ranks = tuple(sorted(odd)) if certain else (max(odd),)
    return _finding(context, "other_root", blocked, ranks, 0.6 if certain else 0.5)


def _none_finished(context: Context, blocked: Blocked) -> Finding:
    group, message = context.group(blocked), blocked.p2p is not None
    started, few = _started(context, blocked)
    lost, agreed = context.forgetful(blocked.rows), _contents_known(context, blocked)
    all_in = set(blocked.rows) == set(group.members)
    facts = {
        "message": message,
        "waiters": who(context.job, blocked.waiters),
        "those": f"all {len(blocked.rows)} ranks" if all_in else ranks_text(blocked.rows),
        "few": who(context.job, few) if few else "",
        "lost": lost,
        "agreed": agreed,
        "hidden": not agreed,
        "started": started,
        "unknown": not group.members_known,
    }
    timed = context.waited(blocked) is not None
    sure = 0.45 if not group.members_known or lost else 0.7 if timed else 0.6
    return _finding(context, "none_finished", blocked, few, sure, **facts)


def _started(context: Context, blocked: Blocked) -> tuple[bool, tuple[int, ...]]:
    """(whether the call is known to have started on a device, the few ranks on whose device it has not)."""
    calls = {rank: context.job.ranks[rank].trace.calls[row] for rank, row in blocked.rows.items()}
    started = any(call["state"] == State.STARTED for call in calls.values())
    late = tuple(sorted(rank for rank, call in calls.items() if call["state"] == State.SCHEDULED))
    return started, late if started and len(late) * 2 < len(calls) else ()


def _contents_known(context: Context, blocked: Blocked) -> bool:
    """Whether what all ranks passed was recorded, so that it was compared: batches may hide it."""
    if blocked.p2p is not None:
        return True
    group = context.group(blocked)
    for rank, row in blocked.rows.items():
        view = context.job.ranks[rank]
        stands_for_others = int(view.family[row]) == Family.COALESCED or (
            int(view.trace.calls["flags"][row]) & Flag.COALESCED_END
            and not context.job.shapes(rank, row).inputs
        )
        if stands_for_others and not known_inside(context.job, group, rank, row):
            return False
    return True


def _finding(
    context: Context, kind: str, blocked: Blocked, ranks: tuple[int, ...], sure: float = 0.0, **facts: object
) -> Finding:
    """A finding about a call, with the stacks of the named ranks first."""
    named = set(ranks)
    guilty = [(rank, blocked.rows[rank]) for rank in ranks if rank in blocked.rows]
    others = [(rank, row) for rank, row in blocked.rows.items() if rank not in named]
    behind = {*context.waiters_behind((-1 - blocked.index,)), *blocked.waiters}
    return replace(
        context.root(kind, ranks, blocked, sure, **facts),
        waiting=tuple(sorted(behind - named)),
        stacks=(*context.stacks(guilty), *context.stacks(others)),
    )
