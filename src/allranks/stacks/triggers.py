"""When to collect: a pure decision over what was observed. No clock, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allranks.stacks.debug_config import DebugOptions


@dataclass(frozen=True)
class Observation:
    """What a glance at the job gave. Times are seconds since the watch began."""

    now_s: float
    marks: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # rank -> (step, calls started, completed)
    output_bytes: Mapping[int, int] = field(default_factory=dict)  # rank -> size of its log files
    oldest_call_s: float | None = None  # age of the oldest open collective
    alive: frozenset[int] = frozenset()  # ranks whose process runs
    silent_until_s: float = 0.0  # the ranks declared silence normal until then


@dataclass(frozen=True)
class TriggerState:
    """What is remembered between glances."""

    marks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    moved_s: float = 0.0
    output: Mapping[int, int] = field(default_factory=dict)
    wrote_s: float = 0.0
    points_done: int = 0
    stalls_done: int = 0  # collections of the present standstill
    silences_done: int = 0
    overdue_done: bool = False
    seen: frozenset[int] = frozenset()  # ranks that were alive once
    lost: frozenset[int] = frozenset()  # ranks whose end was reported


#: A main thread that works switches or burns this much; one that waits wakes up now and then (polls with a timeout).
SAMPLE_S, SWITCHES_PER_S, TICKS_PER_S = 2.0, 5.0, 3.0


@dataclass(frozen=True)
class MainThreadWork:
    """Progress of ranks without a black box: `rounds` grows when every one of them has worked since the last round."""

    rounds: int = 0
    # rank -> when, ticks, switches
    before: Mapping[int, tuple[float, int, int]] = field(default_factory=dict)
    worked: frozenset[int] = frozenset()
    round_s: float = 0.0  # of the last round

    def after(self, now_s: float, work: Mapping[int, tuple[int, int]]) -> MainThreadWork:
        """After one more sample of the main threads: rank -> (clock ticks, context switches)."""
        before, worked = dict(self.before), set(self.worked & work.keys())
        for rank, (ticks, switches) in work.items():
            since, old_ticks, old_switches = before.setdefault(rank, (now_s, ticks, switches))
            passed = now_s - since
            if passed < SAMPLE_S:
                continue
            if (
                switches - old_switches >= SWITCHES_PER_S * passed
                or ticks - old_ticks >= TICKS_PER_S * passed
            ):
                worked.add(rank)
            before[rank] = (now_s, ticks, switches)
        if work and worked >= work.keys():
            return MainThreadWork(self.rounds + 1, before, frozenset(), now_s)
        return replace(self, before=before, worked=frozenset(worked))


def decide_trigger(seen: Observation, state: TriggerState, options: DebugOptions) -> tuple[str, TriggerState]:
    """The reason to collect now, "" for none, and what to remember."""
    now = _remember(seen, state)
    points = options.fixed_points()
    if now.points_done < len(points) and seen.now_s >= points[now.points_done]:
        reason = f"{points[now.points_done]:.0f} s after the start"
        return reason, replace(now, points_done=now.points_done + 1)
    gone = now.seen - seen.alive - now.lost
    if options.rank_lost and gone and seen.alive:
        names = ", ".join(str(rank) for rank in sorted(gone))
        return f"rank {names} ended while {len(seen.alive)} others run", replace(now, lost=now.lost | gone)
    if seen.now_s >= seen.silent_until_s:
        return _standstill(seen, now, options)
    return "", now


def _standstill(seen: Observation, now: TriggerState, options: DebugOptions) -> tuple[str, TriggerState]:
    quiet = seen.now_s - now.moved_s
    limit = options.no_progress_s * 2**now.stalls_done
    if options.no_progress_s and seen.marks and now.stalls_done < options.repeats and quiet >= limit:
        return f"no progress for {quiet:.0f} s", replace(now, stalls_done=now.stalls_done + 1)
    age = seen.oldest_call_s or 0.0
    if options.collective_overdue_s and age >= options.collective_overdue_s and not now.overdue_done:
        return f"a collective is open for {age:.0f} s", replace(now, overdue_done=True)
    silence = seen.now_s - now.wrote_s
    limit = options.no_output_s * 2**now.silences_done
    if options.no_output_s and seen.output_bytes and now.silences_done < options.repeats and silence >= limit:
        return f"no output for {silence:.0f} s", replace(now, silences_done=now.silences_done + 1)
    return "", now


def _remember(seen: Observation, state: TriggerState) -> TriggerState:
    """Progress resets the standstill, output resets the silence."""
    now = replace(state, seen=state.seen | seen.alive)
    if dict(seen.marks) != dict(state.marks):
        now = replace(now, marks=dict(seen.marks), moved_s=seen.now_s, stalls_done=0)
    if dict(seen.output_bytes) != dict(state.output):
        now = replace(now, output=dict(seen.output_bytes), wrote_s=seen.now_s, silences_done=0)
    if seen.oldest_call_s is None:
        now = replace(now, overdue_done=False)
    return now
