"""Who trains together next. Pure: `decide(now, state, options) -> (decision, reason)`.

The rules, in order; the first that speaks decides:
  nobody      no replica joined
  starting    this lighthouse has just started, or somebody is about to tell the quorum of an earlier one: replicas
              that train already come first, nobody new forms a quorum of its own before they had the time
              to come back, or all expect_replicas ask
  finished    the training is over: members reported so, and none of the others is left, or those who are left have
              not as many steps as the finished state (they were healing when the source finished). Who comes now
              is late and is refused after LATE_S. A new training begins when those who finished ask
              again (where the finished step is not known: more than half as many as trained before), when one
              is let in by hand, or after a while
  stragglers  members of the last quorum live but do not ask yet (at the very first quorum: anybody connected);
              they are waited for until the join timeout, counted from the first member that asked (a
              newcomer or spare that waits for long must not cost a member its place)
  expected    the very first quorum, and fewer than expect_replicas ask: waited for until the join timeout
  minority    fewer than half of the last quorum's members that may still be training ask: a minority never
              trains on. Members known to be dead do not count; silent ones do until presumed dead
  too_few     fewer than min_replicas ask
  size        no allowed number of members (multiple_of, divides, max_replicas) can be made of them
  form        all members of the last quorum are there (fast), or nobody is left to wait for, or the join
              timeout is over. Whoever asked by then comes in, unless one of them wants to shrink only
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allranks.lighthouse.options import Options
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import Member

LATE_S = (
    5.0  # so long one that comes after the end is kept waiting for others that begin a new training with it
)
_NAMED = 8  # reasons name at most so many replicas


@dataclass(frozen=True)
class Form:
    """Form a quorum of these members."""

    members: tuple[Member, ...]  # sorted by replica
    spares: tuple[str, ...] = ()
    rule: str = "form"


@dataclass(frozen=True)
class Wait:
    """Not yet. `until` is when time alone may change this (None: only an event can)."""

    rule: str
    missing: tuple[str, ...] = ()  # who is waited for, as far as we know their names
    until: float | None = None
    refused: tuple[str, ...] = ()  # they ask too late, and nobody came to begin a new training with them


Decision = Form | Wait


def decide(now: float, state: QuorumState, options: Options) -> tuple[Decision, str]:
    """The decision and its reason as a sentence. Costs little while stragglers are waited for."""
    for rule in _RULES:
        if (found := rule(now, state, options)) is not None:
            return found
    return _choose(state, options)


def _nobody(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if state.asking:
        return None
    pausing = f", {_pausing(state)}" if state.cooling else ""
    return Wait("nobody", until=state.next_change()), f"no replica requests a quorum{pausing}"


def _starting(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if now >= state.settling_until or _all_expected(state, options):
        return None
    joined = _count(len(state.asking), "replica", "replicas")
    return Wait("starting", until=_earliest(state.settling_until, state)), (
        f"{joined} joined, but this lighthouse is new: members of an earlier quorum come first, if there are any"
    )


def _all_expected(state: QuorumState, options: Options) -> bool:
    """Whether everybody asks who can be there at the very first quorum, and none of them knows of an earlier one."""
    first = state.last is None and not state.wants_word
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
    return Wait("finished", until=_earliest(until, state), refused=refused), (
        f"the training is over ({listed(state.finishers)} finished{at} in quorum {state.number}): "
        f"{listed(state.asking)} {'is' if len(state.asking) == 1 else 'are'} too late; "
        f"a new one begins when {enough} ask, or one is readmitted (`allranks lighthouse readmit`)"
    )


def _stragglers(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    by_last, idle = _by_last(state), _idle(state)
    askers = state.asking_veterans if by_last else state.asking
    if not idle or not askers:
        return None
    deadline = next(iter(askers.values())).asked_at + options.join_timeout_s
    if now >= deadline:
        return None
    what, number = ("member", f" of quorum {state.number}") if by_last else ("connected replica", "")
    not_yet = _count(len(idle), f"{what}{number} does", f"{what}s{number} do")
    joined = _count(len(state.asking), "replica", "replicas")
    reason = f"{joined} joined, {not_yet} not yet: waiting for {listed(idle)}"
    return Wait("stragglers", _some(idle), _earliest(deadline, state)), reason


def _expected(now: float, state: QuorumState, options: Options) -> tuple[Wait, str] | None:
    if state.last is not None or len(state.asking) >= options.expect_replicas:
        return None
    deadline = next(iter(state.asking.values())).asked_at + options.join_timeout_s
    if now >= deadline:
        return None
    return Wait("expected", until=_earliest(deadline, state)), (
        f"{_count(len(state.asking), 'replica', 'replicas')} joined, the first quorum waits for {options.expect_replicas}"
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
        reason = (
            f"the members of quorum {state.number} are training: "
            f"{listed(state.asking)} can join when {listed(absent)} ask again"
        )
    else:
        what = f"members of quorum {state.number}" if by_last else "connected replicas"
        reason = (
            f"only {present} of {present + len(absent)} {what} ask: a minority does not continue training, "
            f"waiting for {listed(absent)}"
        )
    return Wait("minority", _some(absent), state.next_change()), reason


_RULES = (_nobody, _starting, _finished, _stragglers, _expected, _minority)


def _by_last(state: QuorumState) -> bool:
    """Whether members of the last quorum are left, who decide; otherwise everybody connected does."""
    return bool(state.continuing or state.silent)


def _idle(state: QuorumState) -> set[str]:
    """Who could ask and does not."""
    return state.continuing_not_asking if _by_last(state) else state.idle


def _choose(state: QuorumState, options: Options) -> tuple[Decision, str]:
    """Of those who ask: who comes in, who is spare."""
    idle = _idle(state)
    before = {m.replica: m.session for m in state.last.members} if state.last else {}
    asking = [replica.asking for replica in state.asking.values() if replica.asking]
    shrink = bool(before) and any(member.shrink_only for member in asking)
    candidates = [member for member in asking if not shrink or member.replica in before]
    note = " (nobody new: shrink only)" if shrink else ""
    size = options.largest_size(len(candidates))
    if size == 0:
        rule, reason = _why_not(len(candidates), note, state, options)
        return Wait(rule, _some(idle), state.next_change()), reason
    candidates.sort(key=lambda m: (before.get(m.replica) != m.session, -m.step, m.replica))
    members = sorted(candidates[:size], key=lambda member: member.replica)
    spares = tuple(sorted(member.replica for member in candidates[size:]))
    rule, reason = _why(state, idle, before, frozenset(spares))
    if spares:
        reason += f"; {_sizes(options)}: {listed(spares)} {'stays' if len(spares) == 1 else 'stay'} spare"
    return Form(tuple(members), spares, rule), reason + note


def _why_not(count: int, note: str, state: QuorumState, options: Options) -> tuple[str, str]:
    """Too few ask, or no allowed number of members can be made of them."""
    ask, idle = _count(count, "replica asks", "replicas ask"), _idle(state)
    if count >= options.min_replicas:
        return "size", f"{ask}{note}, but {_sizes(options)}"
    waiting = f", waiting for {listed(idle)}" if idle else ""
    pausing = f", {_pausing(state)}" if state.cooling else ""
    return "too_few", f"{ask}, at least {options.min_replicas} must{note}{waiting}{pausing}"


def _why(
    state: QuorumState, idle: set[str], before: dict[str, str], spares: frozenset[str]
) -> tuple[str, str]:
    if before and all(name in state.asking for name in before):
        new = [name for name in state.asking if name not in before and name not in spares]
        joined = f", and {listed(new)} joined" if new else ""
        again = [name for name, session in before.items() if state.asking[name].session != session]
        reborn = f", {listed(again)} restarted" if again else ""
        number = state.number
        who = (
            f"all {len(before)} members of quorum {number} are"
            if len(before) > 1
            else f"the member of quorum {number} is"
        )
        return "fast", f"{who} there{reborn}{joined}"
    if not idle:
        lost = [f"{name} ({gone.reason})" for name, gone in sorted(state.gone.items())]
        without = f", without {listed(lost)}" if lost else ""
        who = f"all {len(state.asking)} replicas" if len(state.asking) > 1 else "the only replica"
        return "everybody", f"{who} joined{without}"
    asking = _count(len(state.asking), "replica asks", "replicas ask")
    return "join_timeout", f"join timeout is over: {asking}, without {listed(idle)}"


def find_wanted(state: QuorumState, options: Options) -> str:
    """Why members that are training should ask again at their next step; "" when they need not."""
    if not state.continuing_not_asking or state.last is None:
        return ""
    waiting = [name for name in state.asking if name not in state.continuing]
    if not waiting:
        return ""
    now_possible = options.largest_size(len(state.continuing))
    if options.largest_size(len(state.continuing) + len(waiting)) <= now_possible:
        return ""
    return f"{listed(waiting)} wait{'s' if len(waiting) == 1 else ''} to join"


def find_broken(state: QuorumState) -> str:
    """Why members that do not ask should at once: others of their quorum have given its group up. "": they need not."""
    if not state.continuing_not_asking:
        return ""
    given_up = [
        name
        for name, replica in state.asking_veterans.items()
        if replica.asking is not None and replica.asking.commit_failures
    ]
    if not given_up:
        return ""
    return f"{listed(given_up)} gave up the group of quorum {state.number} and ask{'s' if len(given_up) == 1 else ''} again"


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: the first few, sorted, then a count."""
    found = list(names)
    if len(found) > _NAMED * 4:
        return f"{len(found)} replicas"
    found.sort()
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _some(names: set[str]) -> tuple[str, ...]:
    """Names for a Wait; all of them when they are few, else none (sorting thousands per event is not worth it)."""
    return tuple(sorted(names)) if len(names) <= _NAMED * 4 else ()


def _earliest(time: float, state: QuorumState) -> float:
    """This time, or when time alone changes the state, whichever comes first."""
    other = state.next_change()
    return time if other is None else min(time, other)


def _pausing(state: QuorumState) -> str:
    return f"{listed(state.cooling)} must back off after repeated losses"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _sizes(options: Options) -> str:
    rules = []
    if options.multiple_of > 1:
        rules.append(f"be a multiple of {options.multiple_of}")
    if options.divides:
        rules.append(f"divide {options.divides}")
    if options.max_replicas:
        rules.append(f"be at most {options.max_replicas}")
    return f"the number of members must {' and '.join(rules)}"
