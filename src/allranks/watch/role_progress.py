"""Progress of processes that make no collectives: rollout engines, reward servers, routers. Pure.

Calls and steps of a black box, and requests and tokens in an engine's metrics, are certain signs. CPU time, context switches and
log output are uncertain, since a polling process shows them too. They count only in a job without certain signs.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field, replace

from allranks.model.formatting import duration

SAMPLE_S = 2.0
#: Counters of engines (vLLM, sglang) that grow while they serve, and gauges of their open requests.
_SERVED = re.compile(
    r"^(?:vllm|sglang):(?:prompt_tokens|generation_tokens|request_success|num_requests|num_aborted_requests)(?:_total)?"
    r"(?:\{[^}]*\})? +([\d.eE+]+)",
    re.M,
)
_WAITING = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{[^}]*\})? +([\d.eE+]+)",
    re.M,
)
PHASES_KEPT = 32  # durations per role and phase
PHASES_KNOWN = 3  # durations that make a usual one
LONG = 4.0  # times the usual duration


def has_worked(passed_s: float, ticks: int, switches: int) -> bool:
    """Whether a thread has used CPU or switched more often than a waiting thread that polls with a timeout."""
    return switches >= 5.0 * passed_s or ticks >= 3.0 * passed_s


@dataclass(frozen=True)
class EngineMetrics:
    """Counts of an engine's metrics endpoint."""

    served: float  # requests and tokens so far
    open: float  # requests


def parse_metrics(text: str) -> EngineMetrics | None:
    """Reads Prometheus text; None if it is not of a known engine."""
    served = [float(value) for value in _SERVED.findall(text)]
    if not served:
        return None
    return EngineMetrics(sum(served), sum(float(value) for value in _WAITING.findall(text)))


@dataclass(frozen=True)
class RoleWork:
    """The work of one process so far. `moves` grows with every sign of work; `certain` tells whether the signs are certain."""

    moves: int = 0
    certain: bool = False
    served: float | None = None
    at_s: float = -1.0
    ticks: int = 0
    switches: int = 0
    log_bytes: int = 0

    def after(
        self, now_s: float, work: tuple[int, int], log_bytes: int, metrics: EngineMetrics | None
    ) -> RoleWork:
        """The state after one more sample; `work` is (clock ticks, context switches)."""
        if metrics is not None:
            moved = self.served is not None and metrics.served != self.served
            certain = metrics.open > 0 or moved  # an idle engine proves nothing about its clients
            return replace(self, certain=certain, served=metrics.served, moves=self.moves + moved)
        passed = now_s - self.at_s
        if self.at_s >= 0 and passed < SAMPLE_S:
            return self
        ticks, switches = work
        busy = has_worked(passed, ticks - self.ticks, switches - self.switches)
        worked = self.at_s >= 0 and (busy or log_bytes > self.log_bytes)
        return replace(
            self, moves=self.moves + worked, at_s=now_s, ticks=ticks, switches=switches, log_bytes=log_bytes
        )


@dataclass(frozen=True)
class PhaseHistory:
    """How long each role has spent in each of its phases (`allranks.phase`)."""

    now: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # pid -> role, phase, since
    lasted_s: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    reported: frozenset[tuple[int, float]] = frozenset()  # pid, since

    def after(self, now_s: float, phases: dict[int, tuple[str, str]]) -> PhaseHistory:
        """The state after one more sample: pid -> role and phase ("" for none)."""
        now, lasted = dict(self.now), dict(self.lasted_s)
        for pid, (role, phase) in phases.items():
            before = now.get(pid)
            if before is not None and before[1] == phase:
                now[pid] = (role, phase, before[2])  # stacks may have corrected the role
                continue
            if before is not None and before[1]:
                key = (role, before[1])
                lasted[key] = (*lasted.get(key, ()), now_s - before[2])[-PHASES_KEPT:]
            now[pid] = (role, phase, now_s)
        now = {pid: one for pid, one in now.items() if pid in phases}
        return replace(self, now=now, lasted_s=lasted)

    def unusual(self, now_s: float) -> tuple[PhaseHistory, tuple[str, ...]]:
        """A sentence for each phase that lasts much longer than usual, once per phase."""
        lines, reported = [], set(self.reported)
        for pid, (role, phase, since_s) in self.now.items():
            usual = self.lasted_s.get((role, phase), ())
            if not phase or len(usual) < PHASES_KNOWN or (pid, since_s) in reported:
                continue
            typical = statistics.median(usual)
            if now_s - since_s > LONG * max(typical, 1.0):
                reported.add((pid, since_s))
                lasted = duration(now_s - since_s)
                lines.append(f"{role} (pid {pid}): {phase} has lasted {lasted}, usually {duration(typical)}")
        return replace(self, reported=frozenset(reported)), tuple(lines)
