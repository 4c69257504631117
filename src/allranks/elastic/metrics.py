"""The metrics of a rank: what training did and what took its time. Everything is a counter, a sum or a short window: nothing grows
with the run. `summary()` is plain data, for the logger that the script has already.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CheckpointMetrics",
    "GradientMetrics",
    "LRMetrics",
    "RecoveryEvent",
    "RecoveryMetrics",
    "TrainingMetrics",
]

log = logging.getLogger("allranks.metrics")
_WINDOW = 100


@dataclass
class Durations:
    """Count, sum and largest of some durations."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)

    @property
    def average_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


@dataclass
class CheckpointMetrics:
    """Saves and loads by tier. `stall` is what the training step waited for a save."""

    saves: dict[str, Durations] = field(default_factory=dict)
    loads: dict[str, Durations] = field(default_factory=dict)
    stall: Durations = field(default_factory=Durations)
    async_failures: int = 0
    async_retries: int = 0

    def record_save(self, tier: str, duration: float, stall: float = 0.0) -> None:
        self.saves.setdefault(str(tier), Durations()).add(duration)
        self.stall.add(stall)

    def record_load(self, tier: str, duration: float) -> None:
        self.loads.setdefault(str(tier), Durations()).add(duration)

    def avg_save_time(self, tier: str | None = None) -> float:
        """Of one tier, or of all saves."""
        timers = [timer for name, timer in self.saves.items() if tier is None or name == tier]
        count = sum(timer.count for timer in timers)
        return sum(timer.total_s for timer in timers) / count if count else 0.0

    def max_save_time(self) -> float:
        return max((timer.max_s for timer in self.saves.values()), default=0.0)

    @property
    def total_saves(self) -> int:
        return sum(timer.count for timer in self.saves.values())

    @property
    def total_loads(self) -> int:
        return sum(timer.count for timer in self.loads.values())


@dataclass(frozen=True)
class RecoveryEvent:
    """One change of the world; `recovery_time` in seconds."""

    timestamp: float
    old_world_size: int
    new_world_size: int
    recovery_time: float
    checkpoint_tier: str | None = None
    step_resumed: int = 0


@dataclass
class RecoveryMetrics:
    """Counts over the whole run; `events` holds the last hundred."""

    events: deque[RecoveryEvent] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    timer: Durations = field(default_factory=Durations)
    worker_joins: int = 0
    worker_failures: int = 0

    def record_recovery(
        self,
        old_world_size: int,
        new_world_size: int,
        recovery_time: float,
        checkpoint_tier: str | None = None,
        step_resumed: int = 0,
    ) -> None:
        sizes = (old_world_size, new_world_size)
        self.events.append(RecoveryEvent(time.time(), *sizes, recovery_time, checkpoint_tier, step_resumed))
        self.timer.add(recovery_time)
        self.worker_joins += new_world_size > old_world_size
        self.worker_failures += new_world_size < old_world_size

    @property
    def total_events(self) -> int:
        return self.timer.count

    @property
    def total_recovery_time(self) -> float:
        return self.timer.total_s

    @property
    def avg_recovery_time(self) -> float:
        return self.timer.average_s


@dataclass
class GradientMetrics:
    """How often and how hard gradients were clipped; magnitudes over the last hundred clips."""

    total_steps: int = 0
    clip_count: int = 0
    clip_magnitudes: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def record_step(self, clipped: bool = False, grad_norm: float | None = None) -> None:
        self.total_steps += 1
        self.clip_count += clipped
        if clipped and grad_norm is not None:
            self.clip_magnitudes.append(float(grad_norm))

    @property
    def clip_frequency(self) -> float:
        return self.clip_count / self.total_steps if self.total_steps else 0.0

    @property
    def avg_clip_magnitude(self) -> float:
        return sum(self.clip_magnitudes) / len(self.clip_magnitudes) if self.clip_magnitudes else 0.0


@dataclass
class LRMetrics:
    """Changes of the rate: how many, and the last hundred as (time, old, new, reason)."""

    count: int = 0
    current: float = 0.0
    adjustments: deque[tuple[float, float, float, str]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def record_adjustment(self, old_lr: float, new_lr: float, reason: str = "topology_change") -> None:
        self.count += 1
        self.current = new_lr
        self.adjustments.append((time.time(), old_lr, new_lr, reason))


@dataclass
class TrainingMetrics:
    """All of it. `clock` is monotonic seconds. Where the time of every rank goes: `allranks goodput`."""

    checkpoint: CheckpointMetrics = field(default_factory=CheckpointMetrics)
    recovery: RecoveryMetrics = field(default_factory=RecoveryMetrics)
    gradient: GradientMetrics = field(default_factory=GradientMetrics)
    lr: LRMetrics = field(default_factory=LRMetrics)
    clock: Callable[[], float] = time.monotonic
    current_step: int = 0
    total_tokens: int = 0
    loss: float | None = None

    def __post_init__(self) -> None:
        self.start_time = self.clock()

    def update_step(self, step: int, tokens_processed: int = 0, loss: float | None = None) -> None:
        """A step is done."""
        self.current_step = step
        self.total_tokens += tokens_processed
        self.loss = loss if loss is not None else self.loss

    @property
    def training_time(self) -> float:
        return self.clock() - self.start_time

    @property
    def tokens_per_second(self) -> float:
        elapsed = self.training_time
        return self.total_tokens / elapsed if elapsed > 0 else 0.0

    @property
    def training_efficiency(self) -> float:
        """The share of time that was not spent in recovery."""
        elapsed = self.training_time
        return max(0.0, 1.0 - self.recovery.total_recovery_time / elapsed) if elapsed > 0 else 1.0

    def summary(self) -> dict[str, Any]:
        """Everything as plain values, in the documented groups."""
        recovery = "total_events worker_joins worker_failures total_recovery_time avg_recovery_time"
        return {
            "training": {
                "elapsed_seconds": self.training_time,
                **_named(self, "current_step total_tokens tokens_per_second"),
                "efficiency": self.training_efficiency,
                **({"loss": self.loss} if self.loss is not None else {}),
            },
            "checkpoint": {
                **_named(self.checkpoint, "total_saves total_loads avg_save_time max_save_time"),
                "total_stall": self.checkpoint.stall.total_s,
                **_named(self.checkpoint, "async_failures async_retries"),
            },
            "recovery": _named(self.recovery, recovery),
            "gradient": _named(self.gradient, "total_steps clip_count clip_frequency avg_clip_magnitude"),
            "lr_adjustments": self.lr.count,
        }

    def log_summary(self) -> None:
        """A few sentences into the log."""
        speed, efficiency = self.tokens_per_second, 100 * self.training_efficiency
        log.info("step %d, %.0f tokens/s, %.1f %% efficiency", self.current_step, speed, efficiency)
        if count := self.checkpoint.total_saves:
            text = "%d saves, %.2f s on average, %d failed"
            log.info(text, count, self.checkpoint.avg_save_time(), self.checkpoint.async_failures)
        if count := self.recovery.total_events:
            log.info("%d recoveries, %.2f s on average", count, self.recovery.avg_recovery_time)


def _named(source: object, names: str) -> dict[str, object]:
    """Attributes, and what methods return, by their names."""
    found = {name: getattr(source, name) for name in names.split()}
    return {name: value() if callable(value) else value for name, value in found.items()}
