"""What the lighthouse remembers of the training: steps, calls, missing replicas. On the loop's thread; no sockets.

Steps come from heartbeats (of replicas, and of agents that read black boxes), arrivals and departures from events. For
a script without step marks, finished collectives count instead. `model/job_state.py` turns this into the page's line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from allranks.lighthouse.status import Departed, StatusEvent, TrainingStatus
from allranks.model.cluster import AGENT
from allranks.model.formatting import age, one_line
from allranks.model.job_state import JobFacts, describe

NOTE_S = 0.05  # faster steps are noted together
RATE_S = 15.0  # the speed is measured over this time
LEAST_RATE_S = 1.0  # a shorter time gives noise
LEAST_STALL_S = 3.0  # a shorter silence is not a stall, however fast the steps are
LEAST_CALL_STALL_S = 10.0  # the same for calls, which agents report every second or two
FIRST_STALL_S = 60.0  # until a few steps show the usual gap
MAX_DEPARTED = 2000
_CONNECTED = ("connected", "returned")
_DISCONNECTED = ("lost", "left", "finished")


@dataclass(frozen=True)
class LostSteps:
    """The training continues from `step` (whole job: or a little before) after it had reached `reached`."""

    step: int
    reached: int
    replicas: bool = False  # all replicas that held the later steps are gone; else all ranks were restarted
    restored: bool = False  # too many steps for the time since the restart: a checkpoint was restored

    @property
    def text(self) -> str:
        gone = f"all replicas that had reached step {self.reached} are gone"
        if self.replicas and self.step == 0:
            return f"training starts over from step 0: {gone}"
        if self.replicas:
            return f"training continues from step {self.step}: {gone}, and the later steps are lost"
        if self.restored:
            return f"training continues from a checkpoint of step {self.step} or earlier; it had reached step {self.reached}"
        return (
            f"training starts over from step 0 after a restart: it had reached step {self.reached}, and step {self.step} is the "
            "first one seen now. If the script restored an early checkpoint, training continues from there"
        )


@dataclass(frozen=True)
class Scene(JobFacts):
    """What the lighthouse knows besides steps. `members` counts the members of the quorum that are connected."""

    alive: Collection[str] = ()  # replicas that are connected
    joining: Collection[str] = ()  # connected, not evicted, and not in the quorum yet


@dataclass
class TrainingView:
    """Remembers steps and departures. `now` is the lighthouse's clock in seconds."""

    now: Callable[[], float]
    departed: dict[str, Departed] = field(default_factory=dict)
    step: int = -1
    _steps: dict[str, int] = field(default_factory=dict)
    _fell_from: int = -1  # the step reached before a restart, until a quorum begins
    _noted: int = -1  # the step at `_moved`
    _moved: float = -NOTE_S  # when the step changed last, to NOTE_S
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=120))
    _left_at: dict[str, float] = field(default_factory=dict)
    _disconnected: set[str] = field(default_factory=set)
    _absences: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    _calls: dict[str, int] = field(default_factory=dict)  # finished ones, by agent
    _called: float = 0.0  # when one of them changed last
    _call_gaps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _call_rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=120))

    def note_step(self, source: str, step: int, now: float) -> LostSteps | None:
        """A heartbeat reported a step; returns the lost steps if the training went back. Must not search: there may be
        thousands of replicas."""
        if step < 0:
            return None
        before, self._steps[source] = self._steps.get(source, -1), step
        if step > self.step:
            self.step, self._fell_from = step, -1
            if now - self._moved >= NOTE_S:
                self._note(now)
        elif before == self.step != step and max(self._steps.values()) < self.step:
            self._fell_from = max(self._fell_from, self.step)
            restored = bool(self._gaps) and step > 2 + 2 * (now - self._moved) / median(self._gaps)
            self._start_again(max(self._steps.values()))
            self._note(now)
            return LostSteps(step, self._fell_from, restored=restored)
        return None

    def begin_at(self, step: int, members: Iterable[str]) -> LostSteps | None:
        """A quorum of other members begins at this step; returns the lost steps if the training had reached a later one.
        The step that a member joined with may be some steps old."""
        reached, self._fell_from = max(self.step, self._fell_from), -1
        if max([step, *(self._steps.get(name, -1) for name in members)]) >= reached - 1:
            return None
        self._start_again(step)
        self._fell_from = reached  # until a step is made: these members may refuse to start there
        return LostSteps(step, reached, replicas=True)

    def _start_again(self, step: int) -> None:
        self.step = self._noted = step
        self._rates.clear()

    def note_calls(self, agent: str, calls: int, now: float) -> None:
        """An agent whose ranks set no step marks reported how many calls they have finished."""
        if self._calls.get(agent) != calls:
            if self._called < now and self._calls:
                self._call_gaps.append(now - self._called)
            self._calls[agent], self._called = calls, now
            self._call_rates.append((now, sum(self._calls.values())))

    def _note(self, now: float) -> None:
        """Notes the time of a step."""
        if 0 <= self._noted < self.step:
            self._gaps.append((now - self._moved) / (self.step - self._noted))
        self._noted, self._moved = self.step, now
        self._rates.append((now, self.step))

    def happened(self, event: StatusEvent) -> None:
        """A replica arrived or departed."""
        name = event.replica
        if not name or name.startswith(AGENT):
            return
        if event.kind in _CONNECTED:
            self._disconnected.discard(name)
        elif event.kind in _DISCONNECTED:
            self._disconnected.add(name)
        if event.kind in (*_DISCONNECTED, "evicted"):
            self._gone(event)
        elif event.kind in _CONNECTED or (event.kind == "let_in" and name not in self._disconnected):
            self.departed.pop(name, None)  # a readmitted replica stays missing until its process connects
            left = self._left_at.pop(name, None)
            if left is not None:
                self._absences.append(self.now() - left)

    def _gone(self, event: StatusEvent) -> None:
        name, known = event.replica, self.departed.get(event.replica)
        if event.kind == "finished" and known is not None:
            self.departed[name] = replace(known, kind="finished")
            return
        reason = event.text.partition(": ")[2] or event.text
        step = self._steps.pop(name, known.step if known else -1)
        self.departed[name] = Departed(name, event.kind, reason, event.at, step)
        self._left_at.setdefault(name, self.now())
        if len(self.departed) > MAX_DEPARTED:
            oldest = next(iter(self.departed))
            del self.departed[oldest]
            self._left_at.pop(oldest, None)
            self._disconnected.discard(oldest)

    def describe(self, scene: Scene) -> TrainingStatus:
        """The page's line, its colour, and its numbers."""
        facts = self.facts(scene)
        line = describe(facts)
        stalled = facts.silent_s if line.state in ("looking", "hung", "stalled") else 0.0
        rate = None if stalled or facts.steps_per_s is None else round(facts.steps_per_s, 3)
        calls = None if stalled or facts.calls_per_s is None else round(facts.calls_per_s, 3)
        return TrainingStatus(
            line.text, line.level, facts.step, rate, round(stalled, 1), facts.members, facts.replicas,
            line.state, facts.calls, calls, facts.tokens_per_s if rate else None, facts.mfu if rate else None,
        )  # fmt: skip

    def facts(self, scene: Scene) -> JobFacts:
        """Everything that the line depends on."""
        now, gone = self.now(), self._absent(scene)
        total = len({*scene.alive, *(one.replica for one in gone)})
        by_calls = self.step < 0 and not total and any(self._calls.values())
        if by_calls:
            limit = _stall_limit(self._call_gaps, LEAST_CALL_STALL_S)
        else:
            limit = _stall_limit(self._gaps, LEAST_STALL_S)
        silent = now - (self._called if by_calls else self._moved)
        return replace(
            scene,
            step=self.step,
            steps_per_s=self._rate(self._rates, now, limit),
            calls=sum(self._calls.values()),
            calls_per_s=self._rate(self._call_rates, now, limit),
            silent_s=silent if by_calls or self.step >= 0 else 0.0,
            usual_s=limit,
            members=min(scene.members, total),
            replicas=total,
            begun=by_calls or self._has_begun(scene, total),
            gone=self._all_gone(scene),
            missing=self._missing(gone, now) + _joining(scene),
        )

    def _absent(self, scene: Scene) -> list[Departed]:
        """Replicas that should be connected and are not."""
        return [
            one
            for name, one in self.departed.items()
            if one.kind == "evicted" or (one.kind == "lost" and name not in scene.alive)
        ]

    def _rate(self, rates: Iterable[tuple[float, int]], now: float, limit: float) -> float | None:
        recent = [(at, number) for at, number in rates if now - at <= max(RATE_S, 3 * limit)]
        if len(recent) < 2:
            return None
        (first, low), (last, high) = recent[0], recent[-1]
        return max(0, high - low) / (last - first) if last - first >= LEAST_RATE_S else None

    def _has_begun(self, scene: Scene, total: int) -> bool:
        begun = self.step > 0 or bool(self._rates and scene.members)
        return begun and not (total and not scene.members and len(self._rates) < 2)

    def _all_gone(self, scene: Scene) -> str:
        """Whether all replicas are gone: "left", "lost" or ""."""
        if scene.alive or not (self.departed or not scene.nodes):
            return ""
        return "left" if any(one.kind == "left" for one in self.departed.values()) else "lost"

    def _missing(self, gone: list[Departed], now: float) -> str:
        """ ", replica-2 back in about 20 s" for the two that departed last."""
        usual = median(self._absences) if self._absences else None
        parts = []
        for one in sorted(gone, key=lambda each: -each.at)[:2]:
            away = now - self._left_at.get(one.replica, now)
            if one.kind == "evicted":
                parts.append(f"{one.replica} evicted")
            elif usual is not None and away < usual:
                parts.append(f"{one.replica} back in about {age(usual - away)}")
            else:
                why = f" ({one_line(one.reason, 80)})" if one.reason else ""
                parts.append(f"{one.replica} lost {age(away)} ago{why}")
        more = f" and {len(gone) - 2} more" if len(gone) > 2 else ""
        return f", {', '.join(parts)}{more}" if parts else ""


def _stall_limit(gaps: Collection[float], least_s: float) -> float:
    """A longer gap is a stall: four times the median gap."""
    return max(least_s, 4 * median(gaps)) if len(gaps) >= 3 else FIRST_STALL_S


def _joining(scene: Scene) -> str:
    """ ", replica-0 joining"; "" before the first quorum, when all replicas are."""
    names = sorted(scene.joining)[:2] if scene.members else []
    return "".join(f", {name} joining" for name in names)
