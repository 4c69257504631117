"""The quorum decision once more, without indexes: slow, obvious, and compared with the real one."""

from __future__ import annotations

from allranks.lighthouse.options import Options
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import Member


def dumb_decision(
    now: float, state: QuorumState, options: Options
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(rule, members, spares) by looking at every replica every time."""
    last = {m.replica: m.session for m in state.last.members} if state.last else {}
    eligible = {
        name: r
        for name, r in state.replicas.items()
        if not r.observer and name not in state.evicted and r.cooling_until <= now
    }
    asking = {name: r.asking for name, r in eligible.items() if r.asking is not None}
    if not asking:
        return "nobody", (), ()
    everybody = (
        state.last is None and not state.needs_recall and 0 < options.expect_replicas <= len(state.asking)
    )
    if now < state.settling_until and not everybody:
        return "starting", (), ()
    continuing = {
        name for name, r in eligible.items() if last.get(name) == r.session and name not in state.departed
    }
    silent = {
        name
        for name, gone in state.gone.items()
        if not gone.certain and now - gone.at < options.presume_dead_s and name not in state.evicted
    }
    finished = [gone for gone in state.gone.values() if gone.finished]
    held = bool(finished) and now < state.finished_at + options.finished_hold_s and not silent
    done = max((gone.step for gone in finished), default=-1)
    few = not continuing and len(asking) <= state.largest / 2
    behind = max(member.step for member in asking.values()) < done
    again = {name for name, gone in state.gone.items() if gone.finished} <= set(asking)
    if held and not continuing - set(asking) and (not again if behind else few):
        return "finished", (), ()
    group = continuing if continuing or silent else set(eligible)
    idle = {name for name in group if name not in asking}
    askers = group & set(asking)
    oldest = min((eligible[name].asked_at for name in askers), default=None)
    patient = all(now < eligible[name].patient_until for name in askers)
    if idle and oldest is not None and patient and now < oldest + options.join_timeout_s:
        return "stragglers", (), ()
    first = min(eligible[name].asked_at for name in asking)
    patient = all(now < eligible[name].patient_until for name in asking)
    few = len(asking) < options.expect_replicas
    if not last and few and patient and now < first + options.join_timeout_s:
        return "expected", (), ()
    absent = idle | silent if continuing or silent else idle
    if len(group & set(asking)) < len(absent):
        return "minority", (), ()
    return _members(asking, last, idle, options)


def _members(
    asking: dict[str, Member], last: dict[str, str], idle: set[str], options: Options
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    shrink = bool(last) and any(member.shrink_only for member in asking.values())
    pool = [member for member in asking.values() if not shrink or member.replica in last]
    if len(pool) < options.min_replicas:
        return "too_few", (), ()
    sizes = [n for n in range(1, len(pool) + 1) if options.allows(n)]
    if not sizes:
        return "size", (), ()
    old = sorted((m for m in pool if last.get(m.replica) == m.session), key=lambda m: (-m.step, m.replica))
    new = sorted((m for m in pool if last.get(m.replica) != m.session), key=lambda m: (-m.step, m.replica))
    ranked = [member.replica for member in old + new]
    chosen, spares = tuple(sorted(ranked[: sizes[-1]])), tuple(sorted(ranked[sizes[-1] :]))
    if last and set(last) <= set(asking):
        return "fast", chosen, spares
    return ("join_timeout" if idle else "everybody"), chosen, spares
