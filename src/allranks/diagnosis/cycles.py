"""Ranks that wait for each other in a circle: somebody skipped a call, or two ranks take two groups in different order. With
sends or receives in the circle: somebody left a message out, or two are crossed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from allranks.diagnosis.absent import explain_ranks, lacking, wrong_peer
from allranks.diagnosis.alignment import broken_habit, find_shift, step_keys, usual_next
from allranks.diagnosis.context import Context, p2p_text, place, ranks_wait
from allranks.diagnosis.job import Family, RankCalls, is_p2p
from allranks.diagnosis.kinds import say
from allranks.diagnosis.mismatches import left_program
from allranks.diagnosis.waits import Blocked, is_lonely
from allranks.model.diagnosis import Finding
from allranks.model.formatting import count, ranks_text
from allranks.model.trace import Flag


def owes_message(view: RankCalls, row: int, peer: int, sends: bool) -> bool:
    """Whether the rank has, up to this call, sent a partner (or received of it) less than it had at the same point of every
    earlier round. A round begins with the rank's rarest collective."""
    begins = _rounds(view, row)
    if len(begins) < 2:
        return False
    counts = messages_per_round(view, row, peer, sends)
    keys = step_keys(view)
    whole = counts if keys[row] == keys[begins[-1]] else counts[:-1]  # the round may end with this call
    if len(whole) > 1 and whole[-1] < min(whole[:-1]):
        return True
    calls = view.trace.calls[: row + 1]
    with_peer = (calls["peer"] == peer) & (view.group[: row + 1] == view.group[row])
    same = with_peer & (view.family[: row + 1] == view.family[row])
    other = with_peer & (view.family[: row + 1] == int(Family.SEND if sends else Family.RECV))
    count, now = int(same[begins[-1] :].sum()), int(other[begins[-1] :].sum())
    earlier = []
    for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        alike = np.flatnonzero(same[begin:end])
        if len(alike) >= count > 0:
            earlier.append(int(other[begin : begin + int(alike[count - 1]) + 1].sum()))
    return bool(earlier) and now < min(earlier)


def messages_per_round(view: RankCalls, row: int, peer: int, sends: bool) -> list[int]:
    """How many messages to (or from) a partner the rank had posted in each round, the last one up to `row` alone."""
    begins = _rounds(view, row).tolist()
    family = int(Family.SEND if sends else Family.RECV)
    mine = (view.trace.calls["peer"] == peer) & (view.family == family)
    ends = [*begins[1:], row] if begins else []
    return [int(mine[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]


def _rounds(view: RankCalls, row: int) -> np.ndarray:
    """Where the rank's rounds begin, before a call: the first with the ring, if nothing was lost."""
    messages = (view.trace.calls["flags"][:row] & int(Flag.P2P | Flag.COALESCED_PART)) != 0
    collective = np.flatnonzero(~messages & ~is_p2p(view.family[:row]))
    own = step_keys(view)[:row][collective]
    keys, counts = np.unique(own, return_counts=True)
    if (counts > 1).any():  # one that was made once parts nothing: torch's first call takes other lines
        keys, counts = keys[counts > 1], counts[counts > 1]
    begins: np.ndarray = collective[own == keys[np.argmin(counts)]] if len(keys) else collective
    whole = int(view.trace.calls["begin"][0]) == 1
    return np.insert(begins, 0, 0) if whole else begins


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
    return row > 0 and broken_habit(context.job.ranks[rank], row) is not None


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
    usual = len(mine) > 1 and len(theirs) > 0 and theirs[-1] in (*theirs[:-1], *mine[:-1])
    earlier = mine[1:-1] if len(mine) > 3 else mine[:-1]  # the first round may be more than one
    return usual and mine[-1] >= max(earlier) > 0


def _one_too_many(context: Context, call: Blocked) -> Finding:
    """The waiter posts a message that its partner has never had in a round."""
    wait = call.p2p
    assert wait is not None
    at = place(context.job.frames(wait.rank, wait.row))
    facts = {
        "sends": wait.sends,
        "peer": str(wait.peer),
        "line": at,
        "lasts": context.last_calls((wait.peer,)),
    }
    found = context.root("one_too_many", (wait.rank,), call, **facts)
    behind = set(context.waiters_behind((wait.peer,))) | {wait.peer}
    stacks = lacking(context, "never_entered", call, (wait.peer,))
    waiting = tuple(sorted(behind - {wait.rank}))
    return replace(found, where=at, waiting=waiting, stacks=stacks.stacks, stack_labels=stacks.stack_labels)


def find_short_round(context: Context, blocked: Blocked) -> Finding | None:
    """Of NCCL, which keeps small messages and continues: the one rank that in one round before posted fewer messages for a partner
    than in all others, where the partner did not."""
    found: dict[int, tuple[int, bool, int, int, int]] = {}
    for rank, view in context.job.ranks.items() if context.group(blocked).backend.startswith("nccl") else ():
        for peer, sends in _directions(view):
            other = context.job.ranks.get(peer)
            if other is None or _posted(view, peer, sends) >= _posted(other, rank, not sends):
                continue
            if (short := _short_round(view, peer, sends)) is not None:
                found[rank] = (peer, sends, *short)
    if len(found) != 1 or context.forgetful(context.job.ranks):
        return None
    ((rank, (peer, sends, row, number, usual)),) = found.items()
    line = place(context.job.frames(rank, row))
    facts = {"peer": str(peer), "sends": sends, "line": line, "number": count(number, "message")}
    finding = context.root("short_round", (rank,), blocked, usual=str(usual), **facts)
    waiting = context.waiting_but((rank,))
    return replace(finding, where=line, waiting=waiting, stacks=context.stacks([(rank, row)]))


def _directions(view: RankCalls) -> list[tuple[int, bool]]:
    """(peer, whether it is sent to) of all messages of a rank whose ring has lost none."""
    if not view.has_p2p or view.cut or int(view.trace.calls["begin"][0]) > 1:
        return []
    rows = np.flatnonzero((view.trace.calls["peer"] >= 0) & is_p2p(view.family))
    families = (view.family[rows] == int(Family.SEND)).tolist()
    return sorted(set(zip(view.trace.calls["peer"][rows].tolist(), families, strict=True)))


def _posted(view: RankCalls, peer: int, sends: bool) -> int:
    family = int(Family.SEND if sends else Family.RECV)
    return int(((view.trace.calls["peer"] == peer) & (view.family == family)).sum())


def _short_round(view: RankCalls, peer: int, sends: bool) -> tuple[int, int, int] | None:
    """(a message of the one whole round with fewer messages than all others, how many it has, how many they have)."""
    end = len(view.trace.calls)
    begins, counts = _rounds(view, end), messages_per_round(view, end, peer, sends)
    most = max(counts[1:-1], default=0)  # the first round may be more than one
    short = [at for at in range(1, len(counts) - 1) if counts[at] < most]
    if len(short) != 1 or len(counts) < ROUNDS + 2:
        return None
    rows = np.flatnonzero(is_p2p(view.family[begins[short[0]] : begins[short[0] + 1]]))
    row = int(begins[short[0]]) + (int(rows[0]) if len(rows) else 0)
    return row, counts[short[0]], most


def crossed(context: Context, ranks: tuple[int, ...], p2p: list[Blocked], calls: list[Blocked]) -> Finding:
    """A circle with a send or receive in it: crossed, to the wrong rank, or without partner."""
    for call in p2p:
        if (wrong := wrong_peer(context, call)) is not None:
            return wrong
    p2p = [call for call in p2p if call.missing] or p2p
    exceeding = [call for call in p2p if _exceeds_round(context, call)]
    if len(exceeding) == 1:
        return _one_too_many(context, exceeding[0])
    extra = _only_message(context, p2p[0], calls) if len(p2p) == 1 else None
    if extra is not None:
        return extra
    if all(call.missing == p2p[0].missing for call in p2p) and _went_on(context, p2p[0], calls):
        finding = explain_ranks(context, min(p2p, key=context.age), p2p[0].missing)
        return replace(finding, cause="p2p_mismatch", confidence=min(0.7, finding.confidence))
    return _no_partner(context, ranks, p2p, calls)


def _only_message(context: Context, mine: Blocked, calls: list[Blocked]) -> Finding | None:
    """A rank that sends or receives in a job where nobody has before, while its partner and all other members of a group
    came to the collective that lacks only this rank."""
    wait, job = mine.p2p, context.job
    if wait is None or job.missing_ranks or context.forgetful(job.ranks):
        return None
    before = is_p2p(job.ranks[wait.rank].family[: wait.row]).any()
    if before or any(view.has_p2p for rank, view in job.ranks.items() if rank != wait.rank):
        return None
    for call in calls:
        came = {*call.rows, *call.passed, *call.behind}
        if call.p2p is None and call.missing == (wait.rank,) and wait.peer in came and len(came) > 1:
            return _extra(context, mine, call, 0.65, only=True, came=ranks_text(came))
    return None


def _no_partner(
    context: Context, ranks: tuple[int, ...], p2p: list[Blocked], calls: list[Blocked]
) -> Finding:
    """Ranks that wait in sends and receives whose other end nobody has posted."""
    waits = [(call, call.p2p) for call in p2p if call.p2p is not None]
    ends = {rank for _, wait in waits for rank in (wait.rank, wait.peer) if not ranks or rank in ranks}
    guilty = tuple(sorted(ends)) or ranks
    parts = []
    for call, wait in waits[:4]:
        text, at = p2p_text(wait, context.group(call).label), place(context.job.frames(wait.rank, wait.row))
        parts.append(say("waits_in", waits=ranks_wait((wait.rank,)), call=text, at=at))
    others = [call for call in calls if call.p2p is None][:2]
    parts += [
        say("waits_in", waits=ranks_wait(call.waiters), call=context.call(call), lines=context.at(call))
        for call in others
    ]
    sure = 0.6 if context.forgetful(guilty) else 0.85
    posted = all(wait.partner >= 0 for _, wait in waits)
    facts = {"parts": "; ".join(parts), "parts_listed": "\n".join(parts), "posted": posted}
    found = context.root("no_partner", guilty, p2p[0], sure, **facts)
    stacks = (entry for call in calls[:6] for entry in context.stacks(call.rows.items()))
    return replace(found, stacks=tuple(stacks))


#: So many earlier rounds of its own must a rank have broken with, where no other rank's order can be compared.
ROUNDS = 3
#: How many calls back a skipped one is looked for.
FOLLOWED = 256


def explain_cycle(context: Context, sink: tuple[int, ...]) -> Finding:
    """The finding for a strongly connected sink of the wait-for graph."""
    ranks = tuple(node for node in sink if node >= 0)
    calls = [context.blocked[-1 - node] for node in sink if node < 0]
    collectives = [call for call in calls if call.p2p is None]
    for call in collectives:
        shift = find_shift(context.job, context.group(call))
        if shift is not None and shift.seq <= call.seq:
            return left_program(context, context.group(call), shift, call)
    if (one := _left_out(context, ranks, calls, collectives)) is not None:
        return one
    p2p = [call for call in calls if call.p2p is not None]
    if p2p:
        return one_left_out(context, ranks, calls) or crossed(context, ranks, p2p, calls)
    return _inversion(context, ranks, calls)


def _left_out(
    context: Context, ranks: tuple[int, ...], calls: list[Blocked], collectives: list[Blocked]
) -> Finding | None:
    """One rank, or all the guilty ones of one call, went on without it. Where several left their round at once nobody
    skipped a call: they take the groups in another order."""
    skipped = {call.index: found for call in collectives if (found := _skippers(context, call, ranks))}
    guilty = sorted({rank for found in skipped.values() for rank in found})
    everybody = set(ranks) or {rank for call in calls for rank in call.rows}
    one_call = len(skipped) == 1 and len(guilty) < len(everybody)
    if len(guilty) != 1 and not one_call:
        return None
    missed = [context.blocked[index] for index, found in skipped.items() if guilty[0] in found]
    call = min(missed, key=context.age)
    added = _added(context, call, guilty[0]) if len(guilty) == 1 else None
    sure = 0.9 if context.place(call) else 0.75  # without lines a call that was added looks like one left out
    return added or lacking(context, "went_on_without", call, skipped[call.index], sure)


def _added(context: Context, call: Blocked, rank: int) -> Finding | None:
    """The rank does not come to a call because it waits in one that it has never made before."""
    row = context.first_open(rank)
    mine = next((b for b in context.blocked if b.rows.get(rank) == row), None)
    if mine is None or len(mine.rows) > 1 or not _is_new(context, mine, rank, row):
        return None
    return _extra(context, mine, call, 0.75)


def _extra(context: Context, mine: Blocked, call: Blocked, sure: float, **facts: object) -> Finding:
    """The one rank in `mine` waits there, and the others in `call`."""
    ((rank, row),) = mine.rows.items()
    at, message = place(context.job.frames(rank, row)), mine.p2p is not None
    facts |= {"mine": context.call(mine), "line": at, "message": message}
    cause = "p2p_mismatch" if message else "extra_collective"
    return replace(lacking(context, "extra_in_circle", call, (rank,), sure, cause, **facts), where=at)


def _is_new(context: Context, call: Blocked, rank: int, row: int) -> bool:
    """Whether the rank has never made this call before, nor have others: else it came to it too early."""
    view = context.job.ranks[rank]
    peers = view.trace.calls["peer"]
    known = (view.stack[:row] == view.stack[row]) & (peers[:row] == peers[row])
    if row < 1 or not view.stack[row] or bool(known.any()):
        return False
    others = (other for r, other in context.job.ranks.items() if r != rank and call.p2p is None)
    return not any(bool((other.stack == view.stack[row]).any()) for other in others)


def _skippers(context: Context, call: Blocked, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks that are not in the call, or came to it only after another one that is blocked, because they skipped it."""
    missing = [rank for rank in call.missing if rank in ranks]
    late = missing + [rank for rank, row in call.rows.items() if row != context.first_open(rank)]
    return tuple(rank for rank in late if _skipped(context, call, rank))


def _skipped(context: Context, call: Blocked, rank: int) -> bool:
    """Whether the rank went on to another call where it, in all earlier rounds, made a call of this group.

    One earlier round is enough if ranks that wait in the call came to it the usual way; without such witnesses the
    rank must have broken with a habit of several rounds.
    """
    view = context.job.ranks[rank]
    lane = context.group(call).lanes.get(rank)
    if lane is None:
        return False
    end = call.rows.get(rank, len(view.sig))
    before = lane.rows[lane.rows < end]
    threads, went_on = view.trace.calls["thread"], context.first_open(rank)
    if len(before) and went_on >= 0 and threads[before[-1]] != threads[went_on]:
        return False  # what one thread does next says nothing about what another has left out
    start = int(before[-1]) + 1 if len(before) else 1
    key = step_keys(view)
    waiter, at = min(call.rows.items())
    stack = context.job.ranks[waiter].stack[at]
    for row in range(max(start, end - FOLLOWED), end):
        habit = usual_next(key, row, 2)
        if not _all_in_group(view, habit, call.group) and not _comes_behind(view, key, row, call.group):
            habit = usual_next(key, row)  # where rounds are not all alike many calls tell which one this is
        if _all_in_group(view, habit, call.group):
            if bool((view.stack[habit] == stack).all()):
                return len(habit) >= ROUNDS or _witnessed(context, call, rank, row, ())
            # At another line than ever before the round itself may have changed: ask those outside the call.
            return _witnessed(context, call, rank, row, call.waiters)
    return (
        went_on >= 1 and not len(usual_next(key, went_on, 2)) and _came_directly(context, call, rank, went_on)
    )


def _comes_behind(view: RankCalls, keys: np.ndarray, row: int, group: int) -> bool:
    """Whether a collective of the group has ever come right behind this call: then it may still come."""
    behind = np.flatnonzero(keys[:row] == keys[row]) + 1
    return bool(((view.group[behind] == group) & ~is_p2p(view.family[behind])).any())


def _all_in_group(view: RankCalls, rows: np.ndarray, group: int) -> bool:
    """Whether there are such calls and all of them are collectives of a group."""
    return len(rows) > 0 and bool(((view.group[rows] == group) & ~is_p2p(view.family[rows])).all())


def _witnessed(context: Context, call: Blocked, rank: int, went_on: int, excluded: tuple[int, ...]) -> bool:
    """Whether somebody else (but the `excluded`), after what this rank did last, made the call that it left out."""
    job = context.job
    before = job.ranks[rank]
    waiter, row = min(call.rows.items())
    stack, sig = job.ranks[waiter].stack[row], job.ranks[waiter].sig[row]
    for peer, view in job.ranks.items():
        if peer == rank or peer in excluded or not len(view.sig):
            continue
        alike = (view.stack == stack) if stack else (view.sig == sig)
        at = int(np.flatnonzero(alike)[-1]) if alike.any() else 0
        same_line = at > 0 and view.stack[at - 1] == before.stack[went_on - 1]
        if same_line and view.sig[at - 1] == before.sig[went_on - 1]:
            return True
    return False


def _came_directly(context: Context, call: Blocked, rank: int, went_on: int) -> bool:
    """In a first round: the rank has called this group before, and others made a like call just before where it is.

    Who lacks in the call itself is not a witness: what it did before was an earlier call.
    """
    job = context.job
    view = job.ranks[rank]
    waiter, row = min(call.rows.items())
    sig = job.ranks[waiter].sig[row]
    used = bool((view.group[:went_on] == call.group).any()) and view.trace.header.dropped == 0
    for blocked in context.blocked if used else ():
        if blocked.rows.get(rank) != went_on or blocked.seq < 0:
            continue
        peers = {p: at for p, at in blocked.rows.items() if p != rank and p not in call.missing and at > 0}
        others = [(job.ranks[peer], at) for peer, at in peers.items()]
        alike = [o for o, at in others if o.sig[at - 1] == sig and int(o.group[at - 1]) != blocked.group]
        if len(alike) * 2 > len(others):
            return True
    return False


def _inversion(context: Context, ranks: tuple[int, ...], calls: list[Blocked]) -> Finding:
    ranks = ranks or tuple(sorted({rank for call in calls for rank in _opposed(calls, call)}))
    ranks = ranks or tuple(sorted({rank for call in calls for rank in call.rows}))
    calls = sorted(calls, key=lambda call: (min(set(call.rows) & set(ranks), default=-1), call.index))
    steps = [_waiting_in(context, call, ranks) for call in calls[:6]]
    groups = " and ".join(list(dict.fromkeys(context.group(call).label for call in calls))[:4])
    inside = [[(rank, row) for rank, row in call.rows.items() if rank in ranks] for call in calls[:6]]
    facts: dict[str, object] = {
        "groups": groups,
        "parts": "; ".join(steps[:3]),
        "parts_listed": "\n".join(steps),
    }
    lonely = any(is_lonely(context.job, call) for call in calls)
    sure = 0.6 if lonely else 0.7 if context.forgetful(ranks) else 0.85
    facts |= {"unknown": lonely}
    found = context.root("inversion", ranks, calls[0], sure, **facts)
    return replace(found, stacks=tuple(entry for rows in inside for entry in context.stacks(rows)))


def _waiting_in(context: Context, call: Blocked, ranks: tuple[int, ...]) -> str:
    """Who of these ranks waits in the call, and for whom of them."""
    absent = tuple(rank for rank in call.missing if rank in ranks)
    waiters = [rank for rank in call.waiters if rank in ranks]
    if not absent:  # they are in all of these calls: in which of them first
        waiters = [rank for rank in waiters if call.rows[rank] == context.first_open(rank)] or waiters
    return say(
        "waits_in",
        waits=ranks_wait(waiters),
        call=context.call(call),
        lines=context.at(call),
        lacking=ranks_text(absent) if absent else "",
        first=not absent,
    )


def _opposed(calls: list[Blocked], call: Blocked) -> list[int]:
    """Ranks that issued this call before another of the circle, while somebody else did it the other way round."""
    found = []
    for other in calls:
        shared = [rank for rank in call.rows if rank in other.rows] if other is not call else []
        before = {rank for rank in shared if call.rows[rank] < other.rows[rank]}
        if before and before != set(shared):
            found += shared
    return found
