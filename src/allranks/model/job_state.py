"""Describes the state of a job in one line with a level. Pure.

The page, `allranks status`, `allranks top` and the metrics all show this line. Agents decide whether a job makes progress: the
level is "warn" from the first suspicion and "bad" from the verdict on. Without agents, only missing steps are visible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from allranks.model.formatting import age, count, speed

Level = Literal["good", "warn", "bad"]
RED_STALL_S = 60.0  # without agents
OLD_RATE_S = 3.0  # agents report every second or two
#: How long ranks had waited when the verdict was made; the line counts on by itself.
_WAITED = re.compile(r"(\d ranks? )(?:has|have) waited (?:(in it) for )?(?:at most )?[\d.]+ \w+(?: \d+ \w+)?")


@dataclass(frozen=True)
class AgentState:
    """What the agent of a node reports about its ranks."""

    motion: str = "moving"  # moving | stalled (under investigation) | hung (with a verdict)
    sentence: str = ""  # the cause, as far as known


@dataclass(frozen=True)
class OpenIncident:
    """An incident that is not closed."""

    kind: str  # hang, death, partition, slow, request
    sentence: str
    outcome: str = ""  # the action taken
    decided: str = ""  # the policy's decision if no action was taken


@dataclass(frozen=True)
class StepWork:
    """The work of ranks in one step, from their step marks; 0: unknown."""

    tokens: float = 0.0
    flops: float = 0.0
    peak: float = 0.0  # peak floating-point operations per second of their GPUs

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(self.tokens + other.tokens, self.flops + other.flops, self.peak + other.peak)


@dataclass(frozen=True)
class JobFacts:
    """Everything that the line depends on. Times in seconds; None and -1: unknown."""

    agents: tuple[AgentState, ...] = ()
    incidents: tuple[OpenIncident, ...] = ()
    step: int = -1
    steps_per_s: float | None = None
    calls: int = 0  # finished by all ranks, for scripts without step marks
    calls_per_s: float | None = None
    silent_s: float = 0.0  # since the last step, or the last call of a script without steps
    usual_s: float = 60.0  # longer than this is unusual
    members: int = 0
    replicas: int = 0  # connected and missing ones; 0: a whole job
    nodes: int = 0
    begun: bool = False
    gone: str = (
        ""  # no replica is connected: they "left" or were "lost"; "ended": no rank of the job is running
    )
    missing: str = ""  # ", replica-2 back in about 20 s"
    waiting: str = ""  # why there is no new quorum
    over: bool = False
    leading: bool = True
    leader: str = ""
    work: StepWork = StepWork()  # of all ranks

    @property
    def tokens_per_s(self) -> float | None:
        return self.steps_per_s * self.work.tokens if self.steps_per_s and self.work.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the GPUs' peak that the training uses."""
        known = self.steps_per_s and self.work.flops and self.work.peak
        return self.steps_per_s * self.work.flops / self.work.peak if self.steps_per_s and known else None


@dataclass(frozen=True)
class StateLine:
    """`state`: standby, finished, hung, looking, recovering, starting, stopped, stalled, training."""

    state: str
    level: Level
    text: str


def describe(facts: JobFacts) -> StateLine:
    """The line for these facts."""
    if not facts.leading:
        return StateLine("standby", "warn", f"Standby: the leader is {facts.leader or 'unknown'}")
    if facts.over:
        at = f" at step {facts.step:,}" if facts.step >= 0 else ""
        return StateLine("finished", "good", f"Finished{at}")
    return _trouble(facts) or _not_training(facts) or _stalled(facts) or _training(facts)


def is_hung(facts: JobFacts) -> bool:
    """Whether an agent reports a hang, or, before any agent has reported, a hang incident is open."""
    if facts.agents:
        return any(agent.motion == "hung" for agent in facts.agents)
    return any(one.kind == "hang" and not one.outcome for one in facts.incidents)


def _trouble(facts: JobFacts) -> StateLine | None:
    """The line for a problem that agents or open incidents report."""
    hang = _newest(facts.incidents, "hang")
    if is_hung(facts):
        return _hung(facts, hang)
    stalled = [agent for agent in facts.agents if agent.motion == "stalled"]
    if stalled:
        cause = next((agent.sentence for agent in stalled if agent.sentence), "")
        lasts = f" for {age(facts.silent_s)}" if facts.silent_s else ""
        text = f"Looking into it: no progress{lasts}{_at(facts)}{_count(facts)}"
        return StateLine("looking", "warn", f"{text}; {cause}" if cause else text)
    if hang is not None:
        what = inside_line(hang.outcome or hang.sentence)
        return StateLine("recovering", "warn", f"Recovering{_at(facts)}{_count(facts)}: {what}")
    death = None if facts.replicas else _newest(facts.incidents, "death")
    if death is not None:
        what = f"{death.sentence}; {death.outcome}" if death.outcome else death.sentence
        return StateLine("recovering", "warn", f"Recovering{_count(facts)}: {inside_line(what)}")
    return None


def _hung(facts: JobFacts, hang: OpenIncident | None) -> StateLine:
    """The line for a hang, with its cause and the action."""
    agents = [agent for agent in facts.agents if agent.motion == "hung"]
    cause = hang.sentence if hang is not None else next((a.sentence for a in agents if a.sentence), "")
    done = "" if hang is None else hang.outcome or hang.decided
    lasts = f" for {age(facts.silent_s)}" if facts.silent_s else ""  # unknown before the first call
    text = f"Hung{lasts}{_at(facts)}" + (f": {inside_line(cause)}" if cause else "")
    return StateLine("hung", "bad", f"{text.rstrip('.')}. {done[:1].upper()}{done[1:]}" if done else text)


def inside_line(sentence: str, waits: bool = True) -> str:
    """A sentence of an incident after a colon. `waits`: ranks still wait, and the line itself says for how long."""
    plain = sentence
    if waits:
        plain = _WAITED.sub(
            lambda found: f"{found[1]}{'waits' if found[1] == '1 rank ' else 'wait'} {found[2] or 'for it'}",
            sentence,
        )
    return plain if plain[1:2].isupper() else f"{plain[:1].lower()}{plain[1:]}"


def _not_training(facts: JobFacts) -> StateLine | None:
    """The line for a job that has not started yet, or has no process left."""
    if facts.gone == "ended":
        return StateLine("stopped", "bad", f"Stopped: no rank is running{_last(facts)}")
    if not facts.begun:
        why = f": {facts.waiting}" if facts.waiting else facts.missing
        here = f", {count(facts.replicas, 'replica')}" if facts.replicas else _count(facts)
        return StateLine("starting", "warn", f"Starting{here}{why}")
    if facts.gone == "left":
        text = f"No replica is training: all have left{_last(facts)}{facts.missing}"
        return StateLine("stopped", "warn", text)
    if facts.gone:
        kind = "replica" if facts.replicas else "agent"
        text = f"Stopped: no {kind} is connected{_last(facts)}{facts.missing}"
        return StateLine("stopped", "bad", text)
    return None


def _stalled(facts: JobFacts) -> StateLine | None:
    """The line for a job without agents that makes no progress."""
    if facts.agents or facts.silent_s < facts.usual_s:
        return None
    why = f"; {facts.waiting}" if facts.waiting else facts.missing
    level: Level = "bad" if facts.silent_s >= max(RED_STALL_S, 2 * facts.usual_s) else "warn"
    what = "step" if facts.step >= 0 or facts.replicas else "call finished"
    text = f"Stalled: no {what} for {age(facts.silent_s)}{_at(facts)}{_count(facts)}{why}"
    return StateLine("stalled", level, text)


def _training(facts: JobFacts) -> StateLine:
    level: Level = "good" if facts.members >= facts.replicas else "warn"
    rate = facts.calls_per_s if facts.step < 0 and not facts.replicas else facts.steps_per_s
    late = facts.silent_s >= min(facts.usual_s, max(OLD_RATE_S, 4 / rate) if rate else facts.usual_s)
    rest = f"{_count(facts)}{facts.missing}"
    if facts.step < 0 and not facts.replicas:
        pace = f", {speed(facts.calls_per_s, 'call')}" if facts.calls_per_s and not late else ""
        last = f", the last one {age(facts.silent_s)} ago" if late else pace
        return StateLine("training", level, f"Running: {facts.calls:,} calls finished{last}{rest}")
    pace = "" if facts.steps_per_s is None or late else f", {speed(facts.steps_per_s, 'step')}"
    pace += f", {facts.tokens_per_s:,.0f} tokens/s" if pace and facts.tokens_per_s else ""
    pace += f", MFU {facts.mfu:.0%}" if pace and facts.mfu else ""
    last = f", the last step {age(facts.silent_s)} ago" if late else pace
    begun = f": step {facts.step:,}" if facts.step >= 0 else ""
    return StateLine("training", level, f"Training{begun}{last}{rest}")


def _newest(incidents: Sequence[OpenIncident], kind: str) -> OpenIncident | None:
    return next((one for one in reversed(incidents) if one.kind == kind), None)


def _last(facts: JobFacts) -> str:
    return f"; the last step was {facts.step:,}" if facts.step >= 0 else ""


def _at(facts: JobFacts) -> str:
    return f", at step {facts.step:,}" if facts.step >= 0 else ""


def _count(facts: JobFacts) -> str:
    """ ", 3 of 4 replicas", or ", 2 nodes" for a whole job."""
    if facts.replicas:
        return f", {facts.members:,} of {facts.replicas:,} replicas"
    return f", {count(facts.nodes, 'node')}" if facts.nodes else ""
