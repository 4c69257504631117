"""Who trains together next. Pure: `decide(now, state, options) -> (decision, reason)`.

A replica joins by requesting a quorum. The rules, in order; the first that applies decides:
  nobody      no replica joined
  starting    this lighthouse has just started, or a client is about to send the quorum of an earlier one: replicas
              that already train come first. Newcomers form no quorum until those have had time to return, or until
              all expect_replicas joined
  finished    the training has finished: members reported it, and the others are gone or hold fewer steps than the
              finished state (they were healing when the source finished). A replica that joins now is refused after
              LATE_S. A new training begins when the finished replicas join again (if the finished step is unknown:
              more than half of the largest quorum), when one is readmitted by hand, or after finished_hold_s
  stragglers  members of the last quorum (at the very first quorum: any connected replica) are alive but have not
              joined: wait for them until the join timeout, counted from the first member that joined, so that a
              newcomer or spare that has waited for long does not cost a member its place
  expected    the very first quorum, and fewer than expect_replicas joined: wait until the join timeout
  minority    fewer than half of the last quorum's members that may still be training joined: a minority never
              continues. Members known to be dead do not count; silent ones count until presumed dead
  too_few     fewer than min_replicas joined
  size        no allowed number of members (multiple_of, divides, max_replicas) fits
  pace        a quorum was formed a moment ago: at most 10 in 2.5 s, with a growing pause while the same members
              make no step
  form        all members of the last quorum joined (fast), no replica is left to wait for, or the join timeout
              expired. Every replica that joined becomes a member, except newcomers when a member wants to shrink
              only, newcomers not proved reachable by members that can continue without them, and replicas that
              cannot connect to the others (reach.py forms the largest connected set). Members that have lost each
              other continue first, without newcomers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from allranks.lighthouse.options import Options
from allranks.lighthouse.reach import largest_set
from allranks.lighthouse.state import QuorumState, Replica
from allranks.model.cluster import Member
from allranks.model.formatting import count

LATE_S = 5.0  # a replica that joins after the end waits this long for others to begin a new training with it
_PROVERS = 64  # members that probe a newcomer; more would be too many connections
_FELLOWS = 8  # newcomers that probe each other
_CUT_OFF_S = 1.0  # how long replicas that cannot be reached are waited for
_NAMED = 8  # replicas that a reason names


@dataclass(frozen=True)
class Form:
    """Form a quorum of these members."""

    members: tuple[Member, ...]  # sorted by replica
    spares: tuple[str, ...] = ()
    rule: str = "form"
    left_out: tuple[str, ...] = ()  # they joined, but cannot connect to the members or have not proved it yet


@dataclass(frozen=True)
class Wait:
    """No quorum yet. `until` is when time alone may change this (None: only an event can)."""

    rule: str
    missing: tuple[str, ...] = ()  # replicas waited for, where few enough to name
    until: float | None = None
    refused: tuple[str, ...] = ()  # joined after the end, and no other replica began a new training


Decision = Form | Wait


def decide(now: float, state: QuorumState, options: Options) -> tuple[Decision, str]:
    """The decision and its reason as a sentence. Cheap while waiting for stragglers."""
    for rule in _RULES:
        if (found := rule(now, state, options)) is not None:
            return found
    return _choose(now, state, options)


def _nobody(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if state.asking:
        return None
    pausing = f", {_pausing(state)}" if state.cooling else ""
    return Wait("nobody", until=state.next_change(now)), f"no replica requests a quorum{pausing}"


def _starting(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if now >= state.settling_until or _all_expected(state, options):
        return None
    return Wait("starting", until=_earliest(state.settling_until, now, state)), (
        f"{_joined(state)}, but this lighthouse has just started: members of an earlier quorum come first"
    )


def _all_expected(state: QuorumState, options: Options) -> bool:
    """Whether all expected replicas joined the very first quorum, and none of them knows of an earlier one."""
    first = state.last is None and not state.needs_recall
    return first and 0 < options.expect_replicas <= len(state.asking)


def _finished(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if not state.too_late or now >= (until := state.finished_at + options.finished_hold_s):
        return None
    late = {name: replica.asked_at + LATE_S for name, replica in state.asking.items()}
    refused = tuple(sorted(name for name, at in late.items() if now >= at))
    until = min([until, *(at for at in late.values() if now < at)])
    done = max(state.gone[name].step for name in state.finishers)
    at = f" at step {done}" if done >= 0 else ""
    enough = listed(state.finishers) if done >= 0 else f"more than half of {state.largest}"
    return Wait("finished", until=_earliest(until, now, state), refused=refused), (
        f"the training has finished ({listed(state.finishers)}{at} in quorum {state.number}): "
        f"{listed(state.asking)} joined too late; "
        f"a new training begins when {enough} join, or one is readmitted (`allranks lighthouse readmit`)"
    )


def _stragglers(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    by_last, idle = _by_last(state), _idle(state)
    askers = state.requesting_members if by_last else state.asking
    if not idle or not askers:
        return None
    since = max(
        [
            next(iter(askers.values())).asked_at,
            *(() if by_last or state.last is None else state.returned(idle)),
        ]
    )
    deadline = _until(since, askers.values(), options)
    if _all_cut_off(now, state, idle):
        deadline = min(deadline, since + _CUT_OFF_S)
    if now >= deadline:
        return None
    what, number = ("member", f" of quorum {state.number}") if by_last else ("connected replica", "")
    not_yet = f"{count(len(idle), what)}{number} {'has' if len(idle) == 1 else 'have'} not"
    reason = f"{_joined(state)}, {not_yet}: waiting for {listed(idle)}"
    return Wait("stragglers", _some(idle), _earliest(deadline, now, state)), reason


def _all_cut_off(now: float, state: QuorumState, idle: Collection[str]) -> bool:
    """Whether a replica that joined cannot reach those that did not: they would be left out, or it would."""
    asking = [replica.session for replica in state.asking.values()]
    return all(state.reach.apart_from(now, state.replicas[name].session, asking) for name in idle)


def _until(since: float, askers: Iterable[Replica], options: Options) -> float:
    return min([since + options.join_timeout_s, *(replica.patient_until for replica in askers)])


def _expected(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if state.last is not None or len(state.asking) >= options.expect_replicas:
        return None
    deadline = _until(next(iter(state.asking.values())).asked_at, state.asking.values(), options)
    if now >= deadline:
        return None
    return Wait("expected", until=_earliest(deadline, now, state)), (
        f"{_joined(state)}, the first quorum waits for {options.expect_replicas}"
    )


def _minority(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if by_last := _by_last(state):
        present = len(state.continuing) - len(state.continuing_not_asking)
        absent = state.continuing_not_asking | state.silent
    else:
        present, absent = len(state.asking), state.idle
    if present >= len(absent):
        return None
    if by_last and present == 0 and not state.silent:
        unusual = state.reach.apart or state.reach.probing or state.reach.unserved
        outside = _apart(now, state, state.asking) if unusual else ""
        reason = (
            f"the members of quorum {state.number} are training: "
            f"{listed(state.asking)} can join when {listed(absent)} request the next quorum{outside}"
        )
    else:
        what = f"members of quorum {state.number}" if by_last else "connected replicas"
        reason = (
            f"only {present} of {present + len(absent)} {what} joined: a minority does not continue training, "
            f"waiting for {listed(absent)}"
        )
    return Wait("minority", _some(absent), state.next_change(now)), reason


_RULES = (_nobody, _starting, _finished, _stragglers, _expected, _minority)


def _by_last(state: QuorumState) -> bool:
    """Whether members of the last quorum are left to decide; otherwise all connected replicas do."""
    return bool(state.continuing or state.silent)


def _idle(state: QuorumState) -> set[str]:
    """Replicas that could join and have not."""
    return state.continuing_not_asking if _by_last(state) else state.idle


def _choose(now: float, state: QuorumState, options: Options) -> tuple[Decision, str]:
    """Sorts the replicas that joined into members, spares and those left out."""
    idle = _idle(state)
    before = {m.replica: m.session for m in state.last.members} if state.last else {}
    asking = [replica.asking for replica in state.asking.values() if replica.asking]
    shrink = bool(before) and any(member.shrink_only for member in asking)
    able = [member for member in asking if not shrink or member.replica in before]
    note = " (shrink only: no newcomers)" if shrink else ""
    candidates = _connected(now, _proved(now, able, state, options), state)
    if _lost_each_other(now, state):
        members = _connected(now, [m for m in able if m.replica in state.continuing], state)
        candidates = members if options.largest_size(len(members)) else candidates
    size = options.largest_size(len(candidates))
    if size == 0:
        rule, reason = _why_not(len(candidates), note, state, options)
        outside = {member.replica for member in able} - {member.replica for member in candidates}
        return Wait(rule, _some(idle), state.next_change(now)), reason + _apart(now, state, outside)
    candidates.sort(key=lambda m: (before.get(m.replica) != m.session, -m.step, m.replica))
    chosen = sorted(candidates[:size], key=lambda member: member.replica)
    if now < (until := state.not_before(chosen)):
        return Wait("pace", until=_earliest(until, now, state)), (
            f"quorum {state.number} was formed a moment ago: the next one in {until - now:.2f} s"
        )
    spares = tuple(sorted(member.replica for member in candidates[size:]))
    left_out: tuple[str, ...] = ()
    if len(able) > len(candidates):
        left_out = tuple(sorted({m.replica for m in able} - {m.replica for m in candidates}))
    rule, reason = _why(now, state, idle, before, frozenset((*spares, *left_out)))
    if spares:
        reason += f"; {_sizes(options)}: {listed(spares)} {'remains' if len(spares) == 1 else 'remain'} spare"
    return Form(tuple(chosen), spares, rule, left_out), reason + _apart(now, state, left_out) + note


@dataclass(frozen=True)
class Unproved:
    """A newcomer that must reach these sessions, and be reached by them, before it joins."""

    member: Member
    provers: tuple[str, ...]


def find_unproved(now: float, state: QuorumState) -> list[Unproved]:
    """Newcomers that may not join the training members yet. Newcomers that join together must reach each other, too; two
    that cannot are left to the choice of the largest set."""
    members = find_provers(state) if state.has_newcomers else []
    found: list[Unproved] = []
    fellows: list[str] = []
    for name, replica in state.asking.items() if members else ():
        member = replica.asking
        if (
            name in state.continuing
            or member is None
            or not replica.probes
            or not (member.address or member.store)
        ):
            continue
        apart = state.reach.apart_from(now, replica.session, fellows)
        provers = (*members, *(one for one in fellows if one not in apart))
        if not state.reach.is_proved(replica.session, provers):
            found.append(Unproved(member, provers))
        elif len(fellows) < _FELLOWS:
            fellows.append(replica.session)
    return found


def find_provers(state: QuorumState) -> list[str]:
    """Sessions of the members that a newcomer must reach, and that must reach it: at most `_PROVERS`."""
    found: list[str] = []
    for member in state.last.members if state.last else ():
        if member.replica in state.continuing and state.replicas[member.replica].probes:
            found.append(member.session)
            if len(found) == _PROVERS:
                break
    return found


def _proved(now: float, members: list[Member], state: QuorumState, options: Options) -> list[Member]:
    """Drops newcomers not proved reachable, where the members of the last quorum can continue without them."""
    if not state.continuing:
        return members
    unproved = {each.member.replica for each in find_unproved(now, state)}
    ready = [member for member in members if member.replica not in unproved]
    return ready if options.largest_size(len(ready)) else members


def _lost_each_other(now: float, state: QuorumState) -> bool:
    """Whether members of the last quorum cannot reach each other now. They continue before newcomers join: what cut
    them may have cut others too, and each group that cannot be made costs seconds."""
    if not state.reach.apart or state.last is None:
        return False
    return bool(state.reach.pairs(now, {member.session for member in state.last.members}))


def _connected(now: float, members: list[Member], state: QuorumState) -> list[Member]:
    """The largest set that can connect to each other; ties go to the newest state, then to more members of the last
    quorum, then to the first names. A replica whose claimed state could not be fetched is dropped if others remain."""
    if state.reach.unserved:
        members = [m for m in members if m.session not in state.reach.unserved] or members
    apart = state.reach.pairs(now, {member.session for member in members}) if state.reach.apart else {}
    dialects = {member.dialect for member in members}
    if not apart and len(dialects) < 2:
        return members
    order = {m.session: place for place, m in enumerate(sorted(members, key=lambda m: m.replica))}
    by_session = {member.session: member for member in members}

    def worth(sessions: Collection[str]) -> tuple[int, int, tuple[int, ...]]:
        inside = [by_session[session] for session in sessions]
        older = sum(member.replica in state.continuing for member in inside)
        return (
            max(m.step for m in inside),
            older,
            tuple(-place for place in sorted(order[s] for s in sessions)),
        )

    sets = []
    for dialect in dialects:
        sessions = [member.session for member in members if member.dialect == dialect]
        inside = {one: others & set(sessions) for one, others in apart.items() if one in sessions}
        sets.append(largest_set(sessions, {one: found for one, found in inside.items() if found}, worth))
    best = max(sets, key=lambda found: (worth(found)[1] > 0, len(found), worth(found)))
    return [member for member in members if member.session in best]


def _apart(now: float, state: QuorumState, names: Collection[str]) -> str:
    """Why these are not members: "; left out: b (cannot connect to a; next try in 2 s)"."""
    if not names:
        return ""
    here = {replica.session: name for name, replica in state.replicas.items()}
    parts = []
    for name in sorted(names)[:_NAMED]:
        if why := find_why_out(now, state, name, here):
            parts.append(f"{name} ({why})")
    return f"; left out: {', '.join(parts)}" if parts else ""


def find_why_out(now: float, state: QuorumState, name: str, here: dict[str, str]) -> str:
    """Why a replica that joined is not a member, if connectivity is the reason; `here`: session -> name."""
    replica = state.replicas.get(name)
    if replica is None or replica.asking is None:
        return ""
    entries = {
        next(iter({*pair} - {replica.session})): entry
        for pair, entry in state.reach.apart.items()
        if replica.session in pair and entry.until > now
    }
    if entries:
        others = listed(here[session] for session in entries if session in here)
        next_s = max(entry.until for entry in entries.values()) - now
        return f"cannot connect to {others}; next try in {next_s:.0f} s"
    if replica.session in state.reach.unserved:
        return "the state that it claims to hold could not be fetched"
    if any(each.member.replica == name for each in find_unproved(now, state)):
        return f"not proved reachable yet by {listed(state.continuing)}"
    dialects = {other.asking.dialect for other in state.asking.values() if other.asking}
    mixed = len(dialects) > 1 or _other_dialect(state, replica.asking)
    return "it speaks another protocol than the members" if mixed else ""


def _why_not(able: int, note: str, state: QuorumState, options: Options) -> tuple[str, str]:
    """Too few joined, or no allowed number of members fits."""
    joined, idle = f"{count(able, 'replica')} joined", _idle(state)
    if able >= options.min_replicas:
        return "size", f"{joined}{note}, but {_sizes(options)}"
    needed = f"at least {options.min_replicas} {'is' if options.min_replicas == 1 else 'are'} needed"
    waiting = f", waiting for {listed(idle)}" if idle else ""
    pausing = f", {_pausing(state)}" if state.cooling else ""
    return "too_few", f"{joined}, {needed}{note}{waiting}{pausing}"


def _why(
    now: float, state: QuorumState, idle: set[str], before: dict[str, str], outside: frozenset[str]
) -> tuple[str, str]:
    if before and all(name in state.asking for name in before):
        new = [name for name in state.asking if name not in before and name not in outside]
        joined = f"; new: {listed(new)}" if new else ""
        again = [name for name, session in before.items() if state.asking[name].session != session]
        restarted = f", {listed(again)} restarted" if again else ""
        members = f"all {len(before)} members" if len(before) > 1 else "the only member"
        return "fast", f"{members} of quorum {state.number} joined{restarted}{joined}"
    if not idle:
        lost = [f"{name} ({gone.reason})" for name, gone in sorted(state.gone.items())]
        without = f", without {listed(lost)}" if lost else ""
        who = f"all {len(state.asking)} replicas" if len(state.asking) > 1 else "the only replica"
        return "everybody", f"{who} joined{without}"
    what = f"{listed(idle)} cannot be reached" if _all_cut_off(now, state, idle) else "join timeout expired"
    return "join_timeout", f"{what}: {_joined(state)}, without {listed(idle)}"


def find_joining(now: float, state: QuorumState) -> list[Member]:
    """Newcomers that can become members as soon as the members request the next quorum."""
    if not state.has_newcomers:
        return []
    members = [state.replicas[name].session for name in state.continuing] if state.reach.apart else []
    unproved = {each.member.replica for each in find_unproved(now, state)}
    found = []
    for name, replica in state.asking.items():
        if (
            replica.asking is not None
            and name not in state.continuing
            and name not in unproved
            and replica.session not in state.reach.unserved
            and not state.reach.apart_from(now, replica.session, members)
            and not _other_dialect(state, replica.asking)
        ):
            found.append(replica.asking)
            members.append(replica.session)  # of two that cannot reach each other, one joins
    return found


def find_wanted(now: float, state: QuorumState, options: Options) -> str:
    """Why training members should request a quorum at their next step; "" when they need not."""
    if not state.continuing_not_asking or state.last is None:
        return ""
    waiting = [member.replica for member in find_joining(now, state)]
    if not waiting:
        return ""
    now_possible = options.largest_size(len(state.continuing))
    if options.largest_size(len(state.continuing) + len(waiting)) <= now_possible:
        return ""
    return f"{listed(waiting)} wait{'s' if len(waiting) == 1 else ''} to join"


def _other_dialect(state: QuorumState, member: Member | None) -> bool:
    members = state.last.members if state.last is not None else ()
    return member is not None and bool(members) and members[0].dialect != member.dialect


def find_broken(state: QuorumState) -> str:
    """Why members should request a quorum at once: others have left its group. "" when they need not."""
    if not state.continuing_not_asking:
        return ""
    left = [
        name
        for name, replica in state.requesting_members.items()
        if replica.asking is not None and replica.asking.commit_failures
    ]
    return f"{listed(left)} left the group of quorum {state.number} and requested another" if left else ""


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: the first few, sorted, then a count."""
    found = list(names)
    if len(found) > _NAMED * 4:
        return f"{len(found)} replicas"
    found.sort()
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _some(names: set[str]) -> tuple[str, ...]:
    """Names for a Wait; none when there are many (sorting thousands per event is not worth it)."""
    return tuple(sorted(names)) if len(names) <= _NAMED * 4 else ()


def _earliest(time: float, now: float, state: QuorumState) -> float:
    """This time, or the next change of the state by time alone, whichever comes first."""
    other = state.next_change(now)
    return time if other is None else min(time, other)


def _pausing(state: QuorumState) -> str:
    leased = state.cooling.keys() & state.silent
    parts = []
    if leased:
        parts.append(f"{listed(leased)} must wait: an earlier process of that name may still be training")
    if flapping := state.cooling.keys() - leased:
        parts.append(f"{listed(flapping)} must back off after repeated losses")
    return ", ".join(parts)


def _joined(state: QuorumState) -> str:
    return f"{count(len(state.asking), 'replica')} joined"


def _sizes(options: Options) -> str:
    rules = []
    if options.multiple_of > 1:
        rules.append(f"be a multiple of {options.multiple_of}")
    if options.divides:
        rules.append(f"divide {options.divides}")
    if options.max_replicas:
        rules.append(f"be at most {options.max_replicas}")
    return f"the number of members must {' and '.join(rules)}"
