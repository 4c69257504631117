"""What all findings about ranks that lack in a call have in common; sends and receives that name the wrong partner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.context import Context, latest_stack
from allranks.diagnose.job import Now
from allranks.diagnose.ops import Family
from allranks.diagnose.p2p import P2PWait
from allranks.diagnose.phrasing import count_ranks, ranks_text, seconds, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding


def draft(context: Context, blocked: Blocked, ranks: tuple[int, ...]) -> Finding:
    """What all findings about absent ranks have in common."""
    latest = [(rank, *latest_stack(context, rank)) for rank in ranks[:4]]
    known = [(rank, frames, label) for rank, frames, label in latest if frames]
    waiters = context.stacks(blocked.rows.items())
    at, does = context.place(blocked), f"{ranks_text(ranks)} {'does' if len(ranks) == 1 else 'do'}"
    running = [rank for rank in ranks[:2] if rank in context.job.ranks and not context.job.ended]
    return Finding(
        "missing_rank",
        ranks,
        "",
        "root",
        context.group(blocked).label,
        blocked.seq if blocked.seq >= 0 else None,
        0.9,
        at,
        context.waiters_behind(ranks),
        context.waited(blocked),
        (*(((rank,), frames) for rank, frames, _ in known), *waiters),
        _evidence(context, blocked, ranks),
        tuple(_where_now(context, rank) for rank in running),
        (f"look at what {does} between {their(ranks)} last call and {at or context.call(blocked)}",),
        (*(label for _, _, label in known), *("in this call" for _ in waiters)),
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
