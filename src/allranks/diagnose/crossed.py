"""A circle of waits with sends or receives in it: somebody left a message out, or two are crossed."""

from __future__ import annotations

from dataclasses import replace

from allranks.diagnose.absent import explain_ranks
from allranks.diagnose.call_habits import breaks_habit, messages_per_round, owes_message
from allranks.diagnose.context import Context, p2p_text
from allranks.diagnose.lacking import wrong_peer
from allranks.diagnose.phrasing import place, ranks_wait, who
from allranks.diagnose.waits import Blocked
from allranks.model.diagnosis import Finding


def one_left_out(context: Context, ranks: tuple[int, ...], calls: list[Blocked]) -> Finding | None:
    """A circle through one rank: its own call has a partner, whose batch waits for what this rank never posted. Of two
    that wait for each other the one that left its own round."""
    odd = ranks
    if len(ranks) > 1:
        odd = _debtors(context, calls)
        if not odd and all(call.p2p is not None for call in calls):
            odd = tuple(rank for rank in ranks if _left_round(context, rank))
    if len(odd) != 1 or not any(odd[0] in call.missing for call in calls):
        return None
    first = context.first_for(odd[0])
    if len(ranks) == 1 and _exceeds_round(context, first):
        return _one_too_many(context, first)
    finding = explain_ranks(context, first, odd)
    return replace(finding, cause="p2p_mismatch") if finding.cause == "missing_rank" else finding


def _debtors(context: Context, calls: list[Blocked]) -> tuple[int, ...]:
    """Ranks that posted fewer messages for a partner who waits than at the same call of all their earlier rounds."""
    found = set()
    for call in calls:
        wait = call.p2p
        if wait is not None and wait.peer in call.missing:
            row = context.first_open(wait.peer)
            if row > 0 and owes_message(context.job.ranks[wait.peer], row, wait.rank, not wait.sends):
                found.add(wait.peer)
    return tuple(sorted(found))


def _left_round(context: Context, rank: int) -> bool:
    row = context.first_open(rank)
    return row > 0 and breaks_habit(context.job.ranks[rank], row)


def _went_on(context: Context, call: Blocked, calls: list[Blocked]) -> bool:
    """Whether the one rank that lacks as partner has posted no message at all, but waits in a collective."""
    rank = call.missing[0] if call.missing else -1
    return any(other.p2p is None and other.rows.get(rank) == context.first_open(rank) for other in calls)


def _exceeds_round(context: Context, call: Blocked) -> bool:
    """Whether the waiter posts more messages with this partner than in any earlier round, while the partner posted as
    many as always."""
    wait = call.p2p
    if wait is None or wait.peer not in context.job.ranks:
        return False
    mine = messages_per_round(context.job.ranks[wait.rank], wait.row, wait.peer, wait.sends)
    end = context.first_open(wait.peer)
    theirs = (
        messages_per_round(context.job.ranks[wait.peer], end, wait.rank, not wait.sends) if end > 0 else []
    )
    usual = len(mine) > 1 and len(theirs) > 1 and theirs[-1] in theirs[:-1]
    earlier = mine[1:-1] if len(mine) > 3 else mine[:-1]  # the first round may be more than one
    return usual and mine[-1] >= max(earlier) > 0


def _one_too_many(context: Context, call: Blocked) -> Finding:
    """The waiter posts a message that its partner has never had in a round."""
    wait = call.p2p
    assert wait is not None
    verb = "receives from" if not wait.sends else "sends to"
    finding = explain_ranks(context, call, (wait.peer,))
    at = place(context.job.frames(wait.rank, wait.row))
    sentence = (
        f"{who(context.job, (wait.rank,))} {verb} rank {wait.peer} once more than in every round before"
        f"{f' ({at})' if at else ''}; rank {wait.peer} posted as many messages for it as always and went on"
    )
    return replace(
        finding,
        cause="p2p_mismatch",
        ranks=(wait.rank,),
        sentence=sentence,
        confidence=0.8,
        where=at,
        missing_evidence=(),
        waiting=tuple(sorted((set(finding.waiting) | {wait.peer}) - {wait.rank})),
        advice=(
            f"look at the loop around {at or 'this call'}: both ends must make the same number of calls",
        ),
    )


def crossed(context: Context, ranks: tuple[int, ...], p2p: list[Blocked], calls: list[Blocked]) -> Finding:
    """A circle with a send or receive in it: crossed, to the wrong rank, or without partner."""
    for call in p2p:
        wrong = wrong_peer(context, call)
        if wrong is not None:
            return wrong
    p2p = [call for call in p2p if call.missing] or p2p
    if len(p2p) == 1 and _exceeds_round(context, p2p[0]):
        return _one_too_many(context, p2p[0])
    if len(p2p) == 1 and _went_on(context, p2p[0], calls):
        finding = explain_ranks(context, p2p[0], p2p[0].missing)
        return replace(finding, cause="p2p_mismatch", confidence=0.7)
    return _no_partner(context, ranks, p2p, calls)


def _no_partner(
    context: Context, ranks: tuple[int, ...], p2p: list[Blocked], calls: list[Blocked]
) -> Finding:
    """Ranks that wait in sends and receives whose other end nobody has posted."""
    waits = [(call, call.p2p) for call in p2p if call.p2p is not None]
    ends = {rank for _, wait in waits for rank in (wait.rank, wait.peer)} & set(ranks)
    guilty = tuple(sorted(ends)) or ranks
    parts = []
    for call, wait in waits[:4]:
        at = place(context.job.frames(wait.rank, wait.row))
        text = p2p_text(wait, context.group(call).label)
        parts.append(f"rank {wait.rank} waits in {text}{f' at {at}' if at else ''}")
    parts += [f"{ranks_wait(call.waiters)} in {context.call(call)}" for call in calls if call.p2p is None][:2]
    first = p2p[0]
    return Finding(
        "p2p_mismatch",
        guilty,
        f"{who(context.job, guilty)} wait for each other, no partner posted: {'; '.join(parts)}",
        "root",
        context.group(first).label,
        None,
        0.6 if context.forgetful(guilty) else 0.85,
        context.place(first),
        context.waiters_behind(guilty),
        context.waited(first),
        tuple(entry for call in calls[:6] for entry in context.stacks(call.rows.items())),
        tuple(parts),
        advice=(
            "give every send its receive, and post both in one batch_isend_irecv where two ranks exchange",
        ),
    )
