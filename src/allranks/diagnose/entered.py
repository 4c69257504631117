"""A call that everybody entered and that still did not end: failed on some, died inside, or nobody's program's fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.align import is_box
from allranks.diagnose.context import Context
from allranks.diagnose.job import Now
from allranks.diagnose.match import known_inside
from allranks.diagnose.ops import ROOTED, Family
from allranks.diagnose.phrasing import (
    call_text,
    is_secondary,
    one_line,
    place,
    ranks_text,
    ranks_wait,
    seconds,
    who,
)
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding
from allranks.model.trace import Flag, State

#: So sure is what one dump alone tells: its rank waits, and nobody knows for whom.
ALONE = 0.35


def explain_alone(context: Context, every: list[Blocked]) -> Finding | None:
    """The first unfinished call of the only rank with a dump, of a group whose members that dump does not name: nobody can be
    blamed, however long it has lasted, and nothing is known to be right."""
    ((rank, view),) = context.job.ranks.items()
    if is_box(view.trace) or context.seen or any(context.group(b).members_known for b in every):
        return None
    blocked = min(every, key=lambda one: one.rows[rank])
    wait, failure = context.waited(blocked), context.failure(blocked)
    call = f"{context.call(blocked)}{context.at(blocked)}"
    waits = (
        f"{who(context.job, (rank,))} waits in {call}{f' for {seconds(wait)}' if wait is not None else ''}"
    )
    known = failure.replace("the call", call) if failure else waits
    sentence = f"{known}; whether another rank never entered it, only the dumps of the other ranks tell"
    asked = "the dumps of the other ranks: run `allranks diagnose` with all of them"
    return replace(
        _finding(context, blocked, "none_finished", (), sentence, ALONE), missing_evidence=(asked,)
    )


def explain_call(context: Context, blocked: Blocked) -> Finding | None:
    """The finding for a blocked call that lacks nobody; None when it merely has not finished yet."""
    if blocked.unsure:
        return _unsure(context, blocked)
    if (ended := _ended_inside(context, blocked)) is not None:
        return ended
    failed = _ended_as(State.FAILED, context, blocked)
    if failed and len(failed) < len(blocked.rows):
        waiting = ranks_wait(rank for rank in blocked.rows if rank not in failed)
        sentence = f"{context.call(blocked)} failed on {who(context.job, failed)}, while {waiting} in it"
        return _finding(context, blocked, "call_error", failed, sentence, 0.85)
    if failed and not _ended_as(State.TIMED_OUT, context, blocked):
        first = _first_to_fail(context, blocked)
        everywhere = f" on all {len(blocked.rows)} ranks, first" if len(blocked.rows) > 1 else ""
        sentence = f"{context.call(blocked)} failed{everywhere} on {who(context.job, first)}"
        return _finding(context, blocked, "call_error", first, sentence, 0.6)
    if blocked.passed:
        return _some_left(context, blocked)
    return _none_finished(context, blocked)


def find_survived(context: Context) -> Finding | None:
    """A call that raised in one rank alone, whose program went on to later calls: those meet the others' in the wrong order."""
    found = []
    for rank, view in context.job.ranks.items():
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
    behind = tuple(r for r in group.members if r != rank and r in context.job.ranks)
    stuck = [b for b in context.blocked if b.group == group.index and b.seq >= seq > 0]
    if not stuck or len(same) > 1:
        return None
    at, last = place(context.job.frames(rank, row)), context.last_call(rank)
    call = call_text(context.job, rank, row, seq, group.label)
    here = any(blocked.seq == seq for blocked in stuck)
    sentence = (
        f"{call} raised {one_line(text)} on {who(context.job, (rank,))}{f' at {at}' if at else ''}, and its program went on, "
        f"to {last}; {'the others waited in it' if here else 'since then its calls do not meet those of the others'}"
    )
    return replace(
        _finding(context, stuck[0], "call_error", (rank,), sentence, 0.85),
        sequence=seq,
        where=at,
        waiting=behind,
        stacks=context.stacks([(rank, row)]),
        evidence=(f"no call had failed on another rank before, and rank {rank} made calls after it",),
        advice=(
            f"look at {at or 'this call'}: let the exception end the program instead of passing over it",
        ),
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
        sentence = f"{who(context.job, ranks)} died with {context.call(blocked)} unfinished: {dead[ranks[0]]}"
        return _finding(context, blocked, "rank_died", ranks, sentence, 0.9)
    left = tuple(r for r in blocked.waiters if context.job.ranks[r].trace.progress.closed == "exit")
    others = context.waiting_but(left)
    if not left or not others or context.job.ended:
        return None
    sentence = f"{who(context.job, left)} left the program with {context.call(blocked)} unfinished; {ranks_wait(others)}"
    return _finding(context, blocked, "missing_rank", left, sentence, 0.8)


def _ended_as(state: State, context: Context, blocked: Blocked) -> tuple[int, ...]:
    states = {r: int(context.job.ranks[r].trace.calls["state"][blocked.rows[r]]) for r in blocked.failed}
    return tuple(rank for rank, found in states.items() if found == state)


def _died_inside(context: Context, blocked: Blocked, rank: int) -> str:
    """How a rank is known to have died in a call that others saw fail; "" when it is not."""
    closed = context.job.ranks[rank].trace.progress.closed
    now = context.seen.get(rank)
    gone = now if now is not None and now.cause == "gone" else None
    if gone is not None and not closed:
        return gone.evidence or "its process is gone"
    if rank in blocked.failed:
        return ""
    if closed and closed != "exit":
        return f"it ended with {one_line(closed)}"
    failed = _ended_as(State.FAILED, context, blocked)
    everybody_else = len(failed) >= len(blocked.rows) - 1 and len(failed) > 1
    return "everybody else's call failed, its own never ended" if everybody_else else ""


def _first_to_fail(context: Context, blocked: Blocked) -> tuple[int, ...]:
    ends = {
        rank: int(context.job.ranks[rank].trace.calls["completed_ns"][row])
        for rank, row in blocked.rows.items()
    }
    known = {rank: ns for rank, ns in ends.items() if ns}
    return (min(known, key=lambda rank: (known[rank], rank)),) if known else tuple(sorted(ends))


def _unsure(context: Context, blocked: Blocked) -> Finding:
    one = len(blocked.unsure) == 1
    dump = "is not seen there, but its dump is" if one else "are not seen there, but their dumps are"
    sentence = (
        f"{ranks_wait(blocked.waiters)} in {context.call(blocked)}; {who(context.job, blocked.unsure)} {dump} damaged, too old, "
        "or without the calls of this group"
    )
    return _finding(context, blocked, "missing_rank", blocked.unsure, sentence, 0.35)


def _some_left(context: Context, blocked: Blocked) -> Finding | None:
    """Some got out, some did not: an unfinished end, unless the operation has a root that they may disagree on."""
    lanes = context.group(blocked).lanes
    certain = any(_state(context, blocked, rank) == Now.DONE for rank in blocked.passed)
    went_on = any(lanes[r].last > blocked.seq for r in blocked.passed if r in lanes)
    wait = context.waited(blocked)
    lasting = wait is not None and wait >= context.patience.limit_s
    if _is_rooted(context, blocked) and (went_on or lasting) and not certain:
        return _root_guess(context, blocked)
    ended = f"{context.call(blocked)} ended on {ranks_text(blocked.passed)} but not on {who(context.job, blocked.waiters)}"
    if wait is None:
        told = went_on and certain and not context.job.ended
        return _maybe_older(context, blocked, ended) if told else None
    if not lasting or not (went_on or certain):
        return None
    sentence = f"{ended}, {seconds(wait)} later: look at the network or device of the latter"
    return _finding(context, blocked, "none_finished", blocked.waiters, sentence, 0.55)


def _maybe_older(context: Context, blocked: Blocked, ended: str) -> Finding:
    sentence = f"{ended}: it hangs there, or that dump is a moment older"
    finding = _finding(context, blocked, "none_finished", blocked.waiters, sentence, 0.35)
    again = "a second dump of all ranks: where nothing has moved, the job hangs"
    return replace(finding, missing_evidence=(again,))


def _is_rooted(context: Context, blocked: Blocked) -> bool:
    rank, row = min(blocked.rows.items())
    return int(context.job.ranks[rank].family[row]) in ROOTED


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
    sentence = (
        f"{context.call(blocked)} ended on {ranks_text(blocked.passed)} and hangs on {ranks_text(blocked.waiters)}: "
        f"{who(context.job, ranks)} probably named another root"
    )
    return _finding(context, blocked, "root_mismatch", ranks, sentence, 0.6 if certain else 0.5)


def _none_finished(context: Context, blocked: Blocked) -> Finding:
    wait = context.waited(blocked)
    tail, group = f" for {seconds(wait)}" if wait is not None else "", context.group(blocked)
    started, few = _started(context, blocked)
    lost = context.forgetful(blocked.rows)
    if blocked.p2p is not None:
        ends = f"both ends of {context.call(blocked)} by {who(context.job, blocked.waiters)}"
        sentence = f"{ends} are posted, and it has not finished{tail}"
    else:
        all_in = set(blocked.rows) == set(group.members)
        those = f"all {len(blocked.rows)} ranks" if all_in else ranks_text(blocked.rows)
        sentence = f"{those} entered {context.call(blocked)} and none finished it{tail}: network or device"
        sentence += ", or an earlier difference that their short rings have lost" if lost else ""
    if few:
        sentence += f"; it never started on the device of {who(context.job, few)}"
    confidence = 0.45 if not group.members_known or lost else 0.7 if wait is not None else 0.6
    finding = _finding(context, blocked, "none_finished", few, sentence, confidence)
    agreed = _contents_known(context, blocked)
    asked = (
        (not agreed, "the calls inside the batch: their sizes were not recorded, or the ring has lost them"),
        (lost, "the calls before: the rings of these ranks were too short to keep them"),
        (
            True,
            "which link or device: `allranks doctor`, `dmesg -T | grep -iE 'xid|mlx5|link'`, and NCCL_DEBUG=INFO logs",
        ),
        (not started, "which rank's kernel started: run with TORCH_NCCL_ENABLE_TIMING=1"),
        (
            not group.members_known,
            "who belongs to the group: its recorder does not say, so a rank without a dump may be lacking",
        ),
    )
    agree = ("operation, sizes and types are the same on all ranks: the programs agree",) if agreed else ()
    missing = tuple(text for wanted, text in asked if wanted)
    return replace(finding, evidence=(*finding.evidence, *agree), missing_evidence=missing)


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
    context: Context, blocked: Blocked, cause: str, ranks: tuple[int, ...], sentence: str, confidence: float
) -> Finding:
    guilty = [(rank, blocked.rows[rank]) for rank in ranks if rank in blocked.rows]
    named = set(ranks)
    others = [(rank, row) for rank, row in blocked.rows.items() if rank not in named]
    evidence: tuple[str, ...] = (
        f"{ranks_text(blocked.waiters)} entered {context.call(blocked)}{context.at(blocked)}",
    )
    if failure := context.failure(blocked):
        evidence += (failure,)
    behind = {*context.waiters_behind((-1 - blocked.index,)), *blocked.waiters}
    return replace(
        context.root(blocked, cause, ranks, sentence, confidence),
        waiting=tuple(sorted(behind - named)),
        stacks=(*context.stacks(guilty), *context.stacks(others)),
        evidence=evidence,
    )
