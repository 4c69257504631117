"""Sends and receives whose partner is another rank than the one they name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnose.context import Context
from allranks.diagnose.lacking import draft
from allranks.diagnose.ops import Family
from allranks.diagnose.p2p import P2PWait
from allranks.diagnose.phrasing import who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding


def wrong_peer(context: Context, blocked: Blocked) -> Finding | None:
    """The waiter itself has the wrong partner: somebody else is waiting for exactly it."""
    wait = blocked.p2p
    assert wait is not None
    if wait.peer < 0 or _known_partner(context, wait):
        return None
    lonely = [
        o for b in context.blocked if (o := b.p2p) is not None and o.partner < 0 and o.peer == wait.rank
    ]
    for other in lonely:
        if other.rank not in (wait.peer, wait.rank) and other.sends != wait.sends:
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
        advice=(
            f"look at the partner that rank {wait.rank} names at {context.place(blocked) or 'this call'}",
        ),
    )


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
