"""Ranks that wait in init_process_group, new_group or destroy_process_group, and those that never came there.

These are calls of all ranks too, but no collective is recorded of them. Black boxes note which of them a rank is in and how
many it has left; without black boxes the stacks of the ranks tell. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from allranks.diagnosis.absent import UNTELLING
from allranks.diagnosis.context import Context, doing, is_secondary, line_in, place
from allranks.diagnosis.kinds import say
from allranks.diagnosis.waits import BELIEVABLE_S
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.formatting import count, duration, one_line, ranks_text
from allranks.model.trace import Progress, Rendezvous

#: Causes of `allranks stacks` that say: the rank waits for others to set up a group.
WAITING = frozenset({"rendezvous_wait", "store_wait"})


def explain_setup(context: Context) -> Finding | None:
    """The ranks that others wait for in a function that sets up or ends groups: what hangs elsewhere follows from it. None when nobody
    waits there."""
    traces = [view.trace for view in context.job.ranks.values()]
    inside = any(trace.progress.inside or trace.header.rendezvous.world_size for trace in traces)
    if not inside and (not context.seen or context.blocked):
        return None
    return (
        _find_apart(context, _SIZE)
        or _find_apart(context, _PORT)
        or _from_boxes(context)
        or _made_differently(context, {})
        or _from_stacks(context)
        or _find_apart(context, _HOST)
    )


@dataclass(frozen=True)
class _Aspect:
    """Something in which all ranks of one rendezvous must agree."""

    name: str
    of: Callable[[Rendezvous], object]  # what is compared
    shown: Callable[[Rendezvous], object]
    meeting: Callable[[Rendezvous], object]  # ranks that differ in this may belong to several worlds
    confidence: float
    variables: str  # that set it


_SIZE = _Aspect(
    "world size",
    of=lambda met: met.world_size,
    shown=lambda met: met.world_size,
    meeting=lambda met: met.address,
    confidence=0.95,
    variables="WORLD_SIZE (or world_size)",
)
_PORT = _Aspect(
    "address",
    of=lambda met: met.address.rpartition(":")[2],
    shown=lambda met: met.address,
    meeting=lambda met: met.world_size,
    confidence=0.9,
    variables="MASTER_ADDR and MASTER_PORT (or init_method)",
)
_HOST = replace(_PORT, of=lambda met: met.address, confidence=0.6)
#: As sure as this is a finding that cannot tell which of the ranks is wrong, and names none.
UNTOLD = 0.5


def _find_apart(context: Context, aspect: _Aspect) -> Finding | None:
    """Ranks that called init_process_group with another address or world size than the others; None when nobody did, or
    nobody has trouble for it."""
    stuck = _stuck_in_init(context)
    for meeting in _meetings(context, aspect):
        troubled = stuck & set(meeting) or (aspect is _SIZE and context.blocked)
        if troubled and len({aspect.of(met) for met in meeting.values()}) > 1:
            return _apart(context, aspect, meeting, stuck)
    return None


def _meetings(context: Context, aspect: _Aspect) -> list[dict[int, Rendezvous]]:
    """Ranks, with their first rendezvous, that should be in one world. Those that are complete at their address are left out:
    a program may make several worlds."""
    traces = {rank: view.trace for rank, view in context.job.ranks.items()}
    known = {r: t.header.rendezvous for r, t in traces.items() if not t.destroyed}
    known = {rank: met for rank, met in known.items() if met.address and met.world_size}
    here = Counter((met.address, met.world_size) for met in known.values())
    found: dict[object, dict[int, Rendezvous]] = defaultdict(dict)
    for rank, met in known.items():
        if aspect is _SIZE or here[met.address, met.world_size] < met.world_size:
            found[aspect.meeting(met)][rank] = met
    return list(found.values())


def _stuck_in_init(context: Context) -> set[int]:
    """Ranks that have waited in init_process_group for too long, or that ended of an error in it."""
    inside = {r: p for r, p in _inside(context).items() if p.inside == "init_process_group"}
    waited = {
        r
        for r, p in inside.items()
        if context.job.ended or _longest_wait(context, {r: p}) >= context.patience.limit_s
    }
    return waited | set(_failed_in_init(context))


def _failed_in_init(context: Context) -> dict[int, Progress]:
    """Ranks that called init_process_group, never finished it and ended with an error."""
    traces = {rank: view.trace for rank, view in context.job.ranks.items()}
    return {
        rank: t.progress
        for rank, t in traces.items()
        if t.header.rendezvous.world_size and t.progress.setups == 0 and t.progress.closed not in ("", "exit")
    }


def _apart(
    context: Context, aspect: _Aspect, meeting: dict[int, Rendezvous], stuck: Collection[int]
) -> Finding:
    """The finding for ranks of one meeting that disagree."""
    changed = tuple(rank for rank, met in sorted(meeting.items()) if _changed(context, aspect, rank, met))
    usual, sure = _usual(aspect, meeting, changed)
    odd = tuple(sorted(rank for rank, met in meeting.items() if aspect.of(met) != usual))
    rest = tuple(sorted(set(meeting) - set(odd)))
    line, named = meeting[odd[0]].line, odd if sure > UNTOLD else ()
    said = {rank: f"{aspect.name} {aspect.shown(met)}" for rank, met in sorted(meeting.items())}
    wrong = [rank for rank in changed if rank in odd and not set(rest) <= set(changed)][:1]
    found = context.root(
        "apart",
        odd,
        None,
        sure,
        odd=said[odd[0]],
        line=line,
        others=ranks_text(rest),
        usual=said[rest[0]],
        names=aspect is _HOST,
        said="\n".join(f"rank {rank}: {text}" for rank, text in list(said.items())[:6]),
        changed="".join(map(str, wrong)),
        before=aspect.shown(context.job.ranks[wrong[0]].trace.header.launched) if wrong else "",
        variables=aspect.variables,
    )
    return replace(found, ranks=named, where=line, waiting=tuple(sorted(set(stuck) - set(named))))


def _usual(aspect: _Aspect, meeting: dict[int, Rendezvous], changed: Collection[int]) -> tuple[object, float]:
    """(what is right, how sure that is): what most ranks say; on a tie what the environment said at the start."""
    values = Counter(aspect.of(met) for met in meeting.values())
    (usual, most), (_, second) = values.most_common(2)
    if most > second:
        return usual, aspect.confidence
    kept = set(values) - {aspect.of(meeting[rank]) for rank in changed}
    return (kept.pop(), aspect.confidence - 0.1) if len(kept) == 1 else (usual, UNTOLD)


def _changed(context: Context, aspect: _Aspect, rank: int, met: Rendezvous) -> bool:
    """Whether the program left what its environment said when it started."""
    launched = context.job.ranks[rank].trace.header.launched
    return bool(aspect.shown(launched)) and aspect.of(launched) != aspect.of(met)


def _from_boxes(context: Context) -> Finding | None:
    job, inside = context.job, _inside(context)
    if not inside:
        return None
    fewest = min(progress.setups for progress in inside.values())
    waiting = {rank: p for rank, p in inside.items() if p.setups == fewest}
    waited = _longest_wait(context, waiting)
    over = any(p.closed for p in waiting.values())
    if waited < context.patience.limit_s and not job.ended and not over:
        return None
    times = f" for {duration(waited)}" if 0 < waited < BELIEVABLE_S else ""
    function = next(iter(waiting.values())).inside
    if function == "new_group" and (odd := _made_differently(context, inside, times)) is not None:
        return odd
    late, gone = _elsewhere(context, inside, fewest)
    if all(p.alone for p in waiting.values()):  # no other rank makes this group
        late, gone = (tuple(r for r in ranks if r in _members_of(waiting)) for ranks in (late, gone))
    lost = job.missing_ranks if function == "init_process_group" else ()
    if late or gone or lost:
        if gone and not late:
            found = _ended_before(context, gone, waiting, function, times)
            return replace(found, waited_s=waited) if over and times else found
        return _never_called(context, late, late or lost, tuple(sorted(waiting)), function, times)
    if function != "new_group":
        return None
    everybody = len(inside) == len(job.ranks)
    return (
        _all_inside(context, inside, waiting, times)
        if everybody
        else _left_it(context, inside, waiting, times)
    )


def _members_of(waiting: dict[int, Progress]) -> tuple[int, ...]:
    """The members of the group that these ranks make; () unless they agree."""
    named = {progress.members for progress in waiting.values()}
    return named.pop() if len(named) == 1 else ()


def _left_it(
    context: Context, inside: dict[int, Progress], waiting: dict[int, Progress], times: str
) -> Finding | None:
    """Members of a new group that have left its new_group, in which the other members still wait for each other."""
    left = tuple(rank for rank in _members_of(waiting) if rank in context.job.ranks and rank not in inside)
    if not left:
        return None
    facts = {"inside": _waiting(waiting, times)}
    return _at_the_wait(
        context, _finding(context, "left_new_group", left, tuple(sorted(waiting)), "new_group", 0.7, **facts)
    )


def _at_the_wait(context: Context, found: Finding) -> Finding:
    """The finding with the line where ranks wait in new_group: those that it names have left theirs."""
    waiting = (context.seen[rank].where for rank in found.waiting if rank in context.seen)
    return replace(found, where=next(filter(None, waiting), ""))


def _made_differently(context: Context, inside: dict[int, Progress], times: str = "") -> Finding | None:
    """Ranks that passed other members to one call of new_group than the others, where ranks wait in it, or in a call of its
    group. torch numbers the groups of a world by these calls."""
    if any(view.trace.destroyed for view in context.job.ranks.values()):
        return None  # then the numbers begin anew
    parties = next((made for made in _group_members(context, inside) if len(made) > 1), None)
    if parties is None:
        return None
    (usual, most), *rest = sorted(parties.items(), key=lambda item: (-len(item[1]), min(item[1])))
    odd, tie = {rank for _, ranks in rest for rank in ranks}, len(rest[0][1]) == len(most)
    facts: dict[str, object] = {"tie": tie, "named": ranks_text(rest[0][1]), "mine": ranks_text(rest[0][0])}
    facts |= {"others": ranks_text(most), "theirs": ranks_text(usual)}
    facts["inside"] = _waiting(inside, times) if inside else ""
    named = tuple(sorted(odd | most if tie else odd))
    waiting, sure = tuple(sorted(inside)) or context.waiting_but(named), 0.6 if tie else 0.85
    found = _finding(context, "other_members", named, waiting, "new_group", sure, **facts)
    return replace(_at_the_wait(context, found), cause="order_inversion")


def _group_members(context: Context, inside: dict[int, Progress]) -> list[dict[tuple[int, ...], set[int]]]:
    """Of each group, in the order in which they were made: the members that ranks know, with these ranks."""
    found: dict[tuple[int, ...], dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
    stuck = {context.group(blocked).name for blocked in context.blocked}
    for rank, view in context.job.ranks.items():
        named = {
            g.name: tuple(sorted(g.ranks)) for g in view.trace.groups if g.name.isdecimal() and not g.store
        }
        world = named.pop("0", ())
        for name, members in named.items():
            if members and (inside or name in stuck):
                found[(int(name), *world)][members].add(rank)
        if (progress := inside.get(rank)) is not None and progress.members and not progress.alone:
            found[(progress.setups, *world)][progress.members].add(rank)
    return [found[key] for key in sorted(found)]


def _longest_wait(context: Context, waiting: dict[int, Progress]) -> float:
    """How long the first of these ranks has been inside, in duration; BELIEVABLE_S when no time is known."""
    seen = {rank: context.job.ranks[rank].snapshot_ns for rank in waiting}
    return max(
        ((seen[rank] - p.inside_ns) / 1e9 for rank, p in waiting.items() if seen[rank]), default=BELIEVABLE_S
    )


def _never_called(
    context: Context,
    late: tuple[int, ...],
    absent: tuple[int, ...],
    waiting: tuple[int, ...],
    function: str,
    times: str,
) -> Finding:
    """`absent` ranks, of which the `late` ones still run, have not come to a function in which others wait."""
    called = [context.job.ranks[rank].trace.header.rendezvous.world_size for rank in late]
    failed = function == "init_process_group" and called and all(called)
    last = context.last_call(late[0]) if len(late) == 1 else ""
    alone = {m for r in waiting if (p := context.job.ranks[r].trace.progress).alone for m in p.members}
    facts: dict[str, object] = {
        "failed": failed,
        "members": ranks_text(alone) if alone else "",
        "inside": _waiting(waiting, times),
        "late": ranks_text(late),
        "last": last,
        "now_in": context.now_in(late[0]) if len(late) == 1 else "",
    }
    if not late and function == "init_process_group":
        met = context.job.ranks[waiting[0]].trace.header.rendezvous
        facts |= {"expected": met.world_size or "", "line": met.line, "started": len(context.job.ranks)}
    sure = 0.9 if late else 0.7
    found = _finding(context, "never_called", absent, waiting, function, sure, alive=bool(late), **facts)
    return found if found.where or not last else replace(found, where=_line(context, late[0]))


def _ended_before(
    context: Context, gone: tuple[int, ...], waiting: dict[int, Progress], function: str, times: str
) -> Finding:
    """Ranks whose program ended before they came to a function in which others wait, or in it by an error of their own."""
    traces = {rank: context.job.ranks[rank].trace for rank in gone}
    worst = min(gone, key=lambda rank: (traces[rank].progress.closed == "exit", rank))
    told = {rank: t.progress.closed for rank, t in traces.items()}
    how, clean = one_line(told[worst]), told[worst] == "exit"
    named = tuple(rank for rank in gone if (told[rank] == "exit") == clean)
    over = all(p.closed for p in waiting.values())
    left = say("waited_in_it", number=count(len(waiting), "rank")) + times
    facts = {
        "clean": clean,
        "how": how,
        "called": function == "init_process_group" and traces[worst].header.rendezvous.world_size,
        "inside": left if over else _waiting(waiting, times),
        "line": line_in(how),
        "worst": str(worst),
    }
    found = _finding(context, "ended_before", named, tuple(sorted(waiting)), function, 0.9, **facts)
    return found if clean else replace(found, cause="rank_died", where=line_in(how))


def _line(context: Context, rank: int) -> str:
    """Where a rank made the call in which it still waits; "" when it waits in none."""
    row = context.first_open(rank)
    return place(context.job.frames(rank, row)) if row >= 0 else ""


def _inside(context: Context) -> dict[int, Progress]:
    """Ranks inside a function that sets up or ends groups, or that lost the others in init_process_group. Who makes its group
    anew while others wait for it in the old one is left out: it is the one to explain, not those."""
    owed = {rank for blocked in context.blocked for rank in blocked.missing}
    traces = {rank: view.trace for rank, view in context.job.ranks.items()}
    inside = {rank: trace for rank, trace in traces.items() if trace.progress.inside}
    waiting = {rank: t.progress for rank, t in inside.items() if not (t.destroyed and rank in owed)}
    failed = {rank: p for rank, p in _failed_in_init(context).items() if is_secondary(p.closed)}
    return waiting | {rank: replace(p, inside="init_process_group") for rank, p in failed.items()}


def _elsewhere(
    context: Context, inside: dict[int, Progress], fewest: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that have not come to the call yet, ranks that have ended)."""
    ranks = {r: view.trace.progress for r, view in context.job.ranks.items() if r not in inside}
    late = tuple(rank for rank, p in ranks.items() if 0 <= p.setups <= fewest and not p.closed)
    return late, tuple(rank for rank, p in ranks.items() if p.closed and p.setups <= fewest)


def _all_inside(
    context: Context, inside: dict[int, Progress], waiting: dict[int, Progress], times: str
) -> Finding | None:
    """Everybody is in new_group and nobody gets out: they do not mean the same group."""
    ahead = tuple(sorted(rank for rank in inside if rank not in waiting))
    if context.job.missing_ranks or len(inside) < 2:
        return None
    if len(waiting) == 1:
        return _fewer_groups(context, inside, next(iter(waiting)), ahead, times)
    facts = {"times": times, "ahead": ranks_text(ahead) if ahead else "", "waiters": ranks_text(inside)}
    seen = [now for rank in sorted(inside) if (now := context.seen.get(rank)) is not None and now.where]
    lines = tuple(dict.fromkeys(now.where for now in seen if now.rank in waiting))
    found = context.root("different_groups", tuple(sorted(waiting)), line=" and ".join(lines[:3]), **facts)
    stacks = tuple(((now.rank,), now.stack) for now in seen if now.stack)
    labels = tuple("live" for _ in stacks)
    return replace(
        found, waiting=tuple(sorted(inside)), where="".join(lines[:1]), stacks=stacks, stack_labels=labels
    )


def _fewer_groups(
    context: Context, inside: dict[int, Progress], rank: int, ahead: tuple[int, ...], times: str
) -> Finding:
    """One rank has left fewer calls of new_group than all others: the next one of all of them makes different groups."""
    fewer = min(inside[other].setups for other in ahead) - inside[rank].setups
    sure, facts = 0.8 if len(ahead) > 1 else 0.5, {"fewer": count(fewer, "call"), "times": times}
    found = _finding(context, "fewer_groups", (rank,), ahead, "new_group", sure, **facts)
    return replace(found, met_another=True)


def _waiting(ranks: Collection[int], times: str = "") -> str:
    """ "2 ranks have waited in it for 15 s"."""
    one = len(ranks) == 1
    return say(
        "wait_in_it", number=count(len(ranks), "rank"), wait="waits" if one else "wait", one=one, times=times
    )


def _is_elsewhere(now: RankNow) -> bool:
    """Whether the stack of a rank shows it at work somewhere else."""
    return now.cause not in WAITING | {"", "unknown", "healthy"} or (
        now.cause == "unknown" and bool(now.where)
    )


def _from_stacks(context: Context) -> Finding | None:
    """Nobody has made a call, and the stacks show some ranks waiting in init_process_group and others elsewhere."""
    job = context.job
    if any(len(view.trace.calls) for view in job.ranks.values()):
        return None
    grouped = any(now.cause in ("collective_wait", "p2p_wait") for now in context.seen.values())
    forming = (
        {"rendezvous_wait"} if grouped else WAITING
    )  # with a group, a key of the store may be the user's own
    waiting = tuple(sorted(rank for rank, now in context.seen.items() if now.cause in forming))
    others = tuple(sorted(now.rank for now in context.seen.values() if _is_elsewhere(now)))
    known = set(context.seen) | set(job.ranks)
    absent = others or tuple(rank for rank in range(job.world_size or 0) if rank not in known)
    if not waiting or not absent:
        return None
    facts = {"unseen": not others, "inside": _waiting(waiting), "alive": bool(others)}
    sure = 0.85 if others else 0.6
    if grouped:
        return _finding(context, "never_called", absent, waiting, "new_group", sure, **facts)
    return _finding(context, "never_came_to_init", absent, waiting, "init_process_group", sure, **facts)


def _finding(
    context: Context,
    kind: str,
    absent: tuple[int, ...],
    waiting: tuple[int, ...],
    function: str,
    sure: float,
    **facts: object,
) -> Finding:
    """A finding about ranks that did not come to a function, with the stacks of all that were seen."""
    seen = [context.seen[rank] for rank in absent if rank in context.seen]
    shown = [*seen, *(context.seen[rank] for rank in waiting if rank in context.seen)]
    stacks = tuple(((now.rank,), now.stack) for now in shown if now.stack)
    located = next((now for now in seen if now.where), None)
    entered_at = " and ".join(dict.fromkeys(now.where for now in shown[len(seen) :][:4] if now.where))
    facts |= {"function": function, "waiters": ranks_text(waiting), "entered_at": entered_at}
    facts["new"] = function == "new_group"
    facts["elsewhere"] = located is not None and located.cause not in UNTELLING  # no wait for the others
    facts["now_evidence"] = "\n".join(now.line for now in seen)
    if located is not None:
        facts |= {"now_rank": str(located.rank), "now_at": located.where, **doing(located)}
    gone = bool(seen) and all(now.cause == "gone" for now in seen)
    cause = "rank_died" if gone else "not_started" if function == "init_process_group" else "missing_rank"
    return replace(
        context.root(kind, absent, None, sure, cause, **facts),
        where=next((now.where for now in shown if now.where), ""),
        waiting=waiting,
        stacks=stacks,
        stack_labels=tuple("live" for _ in stacks),
    )
