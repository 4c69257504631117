"""What all findings about ranks that lack in a call have in common; sends and receives that name the wrong partner; members
of a call that left no file: dead, aborted by gloo, or only not among the files.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from allranks.diagnose.align import is_box, is_hook
from allranks.diagnose.call_sequences import step_keys
from allranks.diagnose.cells import sizes_text
from allranks.diagnose.context import Context, latest_stack
from allranks.diagnose.job import GroupView, Lane, Now
from allranks.diagnose.ops import Family, is_p2p
from allranks.diagnose.p2p import P2PWait
from allranks.diagnose.phrasing import count_ranks, place, ranks_text, seconds, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import FileNote, Finding, RankNow

UNREAD = "unread"  # as the cause of a RankNow: the rank has a file that could not be read
_NOTHING = RankNow(-1, "")


def draft(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """What all findings about absent ranks have in common."""
    latest = [(rank, *latest_stack(context, rank)) for rank in ranks[:4]]
    known = [(rank, frames, label) for rank, frames, label in latest if frames]
    waiters = context.stacks(blocked.rows.items())
    at, does = context.place(blocked), f"{ranks_text(ranks)} {'does' if len(ranks) == 1 else 'do'}"
    running = [rank for rank in ranks[:2] if rank in context.job.ranks and not context.job.ended]
    return replace(
        context.root(blocked, "missing_rank", ranks, "", 0.9),
        stacks=(*(((rank,), frames) for rank, frames, _ in known), *waiters),
        evidence=_evidence(context, blocked, ranks),
        missing_evidence=tuple(_where_now(context, rank) for rank in running),
        advice=(f"look at what {does} between {their(ranks)} last call and {at or context.call(blocked)}",),
        stack_labels=(*(label for _, _, label in known), *("in this call" for _ in waiters)),
    )


def _evidence(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Who entered the call, how it ended, and what those did last who did not enter it."""
    waited, failure = context.waited(blocked), context.failure(blocked)
    entered = f"{ranks_text(blocked.waiters)} entered {context.call(blocked)}{context.at(blocked)}"
    if waited is not None and not blocked.failed:
        entered += f" and {seconds(waited)} later had not left it"
    last = {rank: context.last_call(rank) for rank in ranks[:4]}
    ends = (f"the last call of rank {rank} was {text}" for rank, text in last.items() if text)
    return (entered, *((failure,) if failure else ()), *ends)


def _where_now(context: Context, rank: int) -> str:
    header = context.job.ranks[rank].trace.header
    on = f" on {header.host}" if header.host else " on its node"
    pid = f" --pid {header.pid}" if header.pid else ""
    return f"where rank {rank} is now: run `allranks stacks{pid}`{on}"


def settled(
    base: Finding, sentence: str, confidence: float, advice: str, cause: str = "missing_rank"
) -> Finding:
    """The finding where nothing more needs to be collected."""
    return replace(
        base, cause=cause, sentence=sentence, confidence=confidence, missing_evidence=(), advice=(advice,)
    )


def waiting_text(context: Context, blocked: Blocked, guilty: tuple[int, ...]) -> str:
    """ "7 ranks have waited 31 s": all that wait for the guilty, directly or not, as long as the first of them."""
    behind = (set(context.waiters_behind(guilty)) | set(blocked.waiters)) - set(guilty)
    number = len(behind)
    verb = "has" if number == 1 else "have"
    failed = [rank for rank, row in blocked.rows.items() if context.job.ranks[rank].now[row] == Now.FAILED]
    if blocked.rows and len(failed) == len(blocked.rows):
        return context.failure(blocked)
    wait = context.waited(blocked)
    text = f"{count_ranks(number)} {verb} waited {seconds(wait)}" if wait is not None else ""
    return text or f"{count_ranks(number)} wait{'s' if number == 1 else ''} for it"


def their(ranks: tuple[int, ...]) -> str:
    return "its" if len(ranks) == 1 else "their"


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
    verbs = ("sends to", "receives from") if wait.sends else ("receives from", "sends to")
    sentence = (
        f"{who(context.job, (wait.rank,))} {verbs[0]} rank {wait.peer}, but it is rank {rank} that {verbs[1]} it "
        f"(group {context.group(blocked).label})"
    )
    at = context.place(blocked) or "this call"
    return replace(
        draft(context, blocked, (wait.peer,)),
        cause="p2p_mismatch",
        ranks=(wait.rank,),
        sentence=sentence,
        confidence=0.85,
        waiting=tuple(sorted({wait.rank, rank})),
        stacks=context.stacks([(wait.rank, wait.row), (rank, row)]),
        stack_labels=(),
        missing_evidence=(),
        advice=(f"look at the partner that rank {wait.rank} names at {at}",),
    )


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


def explain_without_file(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Members without a file: dead, or only not among the files. gloo also kills the innocent partner of a wrong call."""
    group = context.group(blocked)
    odd = _aborted_partner(context, group, blocked) or _left_its_round(context, ranks)
    if odd is not None:
        return odd
    if (unread := _unread(context, blocked, ranks)) is not None:
        return unread
    seen = [
        context.seen[rank] for rank in ranks if rank in context.seen and context.seen[rank].cause == "gone"
    ]
    if not seen and all(is_hook(context.job.ranks[rank].trace) for rank in blocked.rows):
        return _did_not_dump(context, blocked, ranks)
    many = len(ranks) * 2 > len(group.members) and len(ranks) > 2
    several = len(ranks) > 1  # each of them may be another's victim, or only not collected
    # A black box survives its process: one that is missing was more likely not collected.
    boxes = all(is_box(context.job.ranks[rank].trace) for rank in blocked.rows)
    sure = 0.9 if seen else 0.3 if many else 0.45 if boxes or several else 0.6
    known = f": {seen[0].evidence}" if seen and seen[0].evidence else ""
    others = f"which {ranks_text(blocked.missing)} did not enter either" if blocked.missing else ""
    sentence = (
        f"there is no file of {ranks_text(ranks)}{known}; {waiting_text(context, blocked, ranks)} in {context.call(blocked)}, "
        f"{others or 'in which nobody else is missing'}"
    )
    advice = f"look for the last log lines of {ranks_text(ranks)} (killed, out of memory, node down)"
    missing = f"the black box, dump or log of {ranks_text(ranks)}: run `allranks diagnose` with it"
    finding = settled(draft(context, blocked, ranks), sentence, sure, advice, "rank_died")
    return replace(finding, where="", missing_evidence=(missing,))


def unread_ranks(files: Sequence[FileNote], there: Container[int | None]) -> dict[int, RankNow]:
    """Ranks that have a file of which nothing could be read: that says nothing of the rank."""
    notes = [note for note in files if note.status in ("damaged", "unreadable") and note.rank is not None]
    return {
        note.rank: RankNow(note.rank, UNREAD, "", f"the file of rank {note.rank} {_problem(note)}")
        for note in notes
        if note.rank is not None and note.rank not in there
    }


def _problem(note: FileNote) -> str:
    if note.status == "damaged":
        return f"is damaged, and nothing of it could be read ({note.path}: {note.note})"
    return f"could not be opened ({note.path}: {note.note})"


def _unread(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding | None:
    """Members whose file could not be read: they may be inside the call like the others."""
    texts = [
        context.seen[rank].evidence for rank in ranks if context.seen.get(rank, _NOTHING).cause == UNREAD
    ]
    if len(texts) < len(ranks):
        return None
    sentence = (
        f"{texts[0]}: whether {ranks_text(ranks)} entered {context.call(blocked)} is not known; "
        f"{waiting_text(context, blocked, ranks)} in it"
    )
    advice = f"read the files as their owner or as root, or copy those of {ranks_text(ranks)} again"
    finding = settled(draft(context, blocked, ranks), sentence, 0.35, advice)
    return replace(finding, missing_evidence=tuple(texts))


def _did_not_dump(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """Members without a file where torch's hook records: only ranks whose call timed out write one."""
    at = context.place(blocked)
    sentence = (
        f"{ranks_text(ranks)} did not enter {context.call(blocked)}{f' ({at})' if at else ''}, or ended before it: "
        f"there is no dump of {'it' if len(ranks) == 1 else 'them'}; {waiting_text(context, blocked, ranks)}"
    )
    finding = draft(context, blocked, ranks)
    evidence = "with this backend only the ranks that wait write a dump when a call times out"
    asked = f"where {ranks_text(ranks)} is: the end of its log, or `allranks stacks` on its node"
    return replace(
        finding,
        sentence=sentence,
        confidence=0.6,
        evidence=(*finding.evidence, evidence),
        missing_evidence=(asked,),
    )


def _left_its_round(context: Context, ranks: tuple[int, ...]) -> Finding | None:
    """The one rank among those with a file that, before it came to wait, left out a call which it had always made."""
    broken, job = context.left_round, context.job
    if len(broken) != 1:
        return None
    rank, usual = next(iter(broken.items()))
    row = context.first_open(rank)
    if row < 0:
        return None
    blocked = next(b for b in context.blocked if b.rows.get(rank) == row)
    cause, what = _difference(context, rank, row, usual)
    at, line = place(job.frames(rank, usual)), place(job.frames(rank, row))
    skipped = cause == "missing_rank" or is_p2p(job.ranks[rank].family[[usual]])[0]
    sentence = (
        f"{who(job, (rank,))} is in {context.call(blocked)}{f' at {line}' if line else ''}, {what}; there is no file of "
        f"{ranks_text(ranks)}"
    )
    finding = draft(context, blocked, (rank,))
    advice = f"look for a condition, exception or early end of a loop that lets rank {rank} pass {at or 'that call'}"
    if not skipped:
        advice = f"look at {line or 'that call'}: it must not depend on the rank"
    return replace(
        finding,
        cause=cause,
        sentence=sentence,
        confidence=0.6,
        where=at if skipped else line,
        evidence=finding.evidence[:1],
        missing_evidence=(f"the file of {ranks_text(ranks)}", *finding.missing_evidence),
        advice=(advice,),
    )


def _difference(context: Context, rank: int, row: int, usual: int) -> tuple[str, str]:
    """(cause, sentence part): how the call of a rank differs from the one that it has always made at this point."""
    job, view = context.job, context.job.ranks[rank]
    ops, at = (job.op(rank, row), job.op(rank, usual)), place(job.frames(rank, usual))
    before = f"where in all rounds before it called {ops[1]}{f' at {at}' if at else ''}"
    if is_p2p(view.family[[row, usual]]).any():
        return "p2p_mismatch", before
    if ops[0] != ops[1] and at and at == place(job.frames(rank, row)):
        return "type_mismatch", before
    if view.stack[row] == view.stack[usual] and view.stack[row]:
        cause = _changed(context, rank, usual, row)
        shapes = [job.shapes(rank, at) for at in (row, usual)]
        texts = [
            sizes_text(s.inputs) if cause == "size_mismatch" else "/".join(s.input_dtypes) for s in shapes
        ]
        if texts[0] != texts[1]:
            return cause, f"with {texts[0]}, where in all rounds before it passed {texts[1]}"
        return cause, "with other arguments than in all rounds before"
    known = bool((step_keys(view)[:row] == step_keys(view)[row]).any())
    return "missing_rank" if known else "extra_collective", before


def _aborted_partner(context: Context, group: GroupView, blocked: Blocked) -> Finding | None:
    """One survivor of a gloo pair with one call unlike all others: gloo aborts the rank that gets more than it expects."""
    if group.backend != "gloo" or len(group.lanes) != 1 or len(group.members) != 2:
        return None
    lane = next(iter(group.lanes.values()))
    gone = next(rank for rank in group.members if rank != lane.rank)
    if gone in context.seen and context.seen[gone].evidence and not _was_aborted(context, gone):
        return None  # it is known to have ended otherwise
    view = context.job.ranks[lane.rank]
    sig, now = view.sig[lane.rows], view.now[lane.rows]
    for at in range(len(sig) - 1, 0, -1):
        if int((sig == sig[at]).sum()) > 1 or now[at] == Now.DONE:
            continue
        behind = at + 1 < len(sig)
        if behind and sig[at - 1] == sig[at + 1]:
            return _killer(context, blocked, lane, at, _made_before(context, lane, at))
        if not behind and _outgrew(context, lane, at):
            return _killer(context, blocked, lane, at, _made_before(context, lane, at))
    return None


def _was_aborted(context: Context, rank: int) -> bool:
    """Whether the log of a rank without a file says that gloo aborted it."""
    return rank in context.seen and "gloo::EnforceNotMet" in context.seen[rank].evidence


def _outgrew(context: Context, lane: Lane, at: int) -> bool:
    """Whether the call gives more than the calls of its kind before it, of which the last two were alike."""
    view = context.job.ranks[lane.rank]
    before = [row for row in lane.rows[:at].tolist() if view.family[row] == view.family[lane.rows[at]]]
    if len(before) < 2 or view.sig[before[-1]] != view.sig[before[-2]]:
        return False
    return context.job.input_bytes(lane.rank, int(lane.rows[at])) > context.job.input_bytes(
        lane.rank, before[-1]
    )


def _made_before(context: Context, lane: Lane, at: int) -> str:
    """The cause of a call unlike all others: one of its line was made before with other arguments, or it is extra."""
    stacks, rows = context.job.ranks[lane.rank].stack, lane.rows
    alike = np.flatnonzero(stacks[rows[:at]] == stacks[rows[at]])
    if not len(alike) or not stacks[rows[at]]:
        return "extra_collective"
    return _changed(context, lane.rank, int(rows[alike[-1]]), int(rows[at]))


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


def _killer(context: Context, blocked: Blocked, lane: Lane, at: int, cause: str) -> Finding:
    row, seq, group = int(lane.rows[at]), int(lane.seqs[at]), context.group(blocked)
    line = place(context.job.frames(lane.rank, row))
    other = ranks_text(rank for rank in group.members if rank != lane.rank)
    what = "made an extra" if cause == "extra_collective" else "called"
    sentence = (
        f"rank {lane.rank} {what} {context.job.op(lane.rank, row)} #{seq} of group {group.label}{f' at {line}' if line else ''}, "
        f"unlike all its other calls; {other} is gone, as gloo aborts a rank that gets more than it expects"
    )
    advice = f"make the call at {line or 'that line'} on all ranks of the group, and with the same sizes"
    gone = next(rank for rank in group.members if rank != lane.rank)
    sure = _was_aborted(context, gone)
    evidence = f"#{seq} is the only call of its kind, and the other rank is gone since"
    return replace(
        settled(draft(context, blocked, (lane.rank,)), sentence, 0.85 if sure else 0.6, advice, cause),
        sequence=seq,
        where=line,
        waiting=(),
        stacks=context.stacks([(lane.rank, row)]),
        stack_labels=(),
        evidence=(evidence, *((f"of rank {gone}, {context.seen[gone].evidence}",) if sure else ())),
        missing_evidence=()
        if sure
        else (f"the log of {other}: 'gloo::EnforceNotMet' confirms it, 'Killed' refutes it",),
    )
