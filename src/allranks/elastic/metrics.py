"""Training metrics of one rank: counters, sums and short windows, so memory does not grow with the run.

`summary()` returns plain data for the logger of the script.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("allranks.metrics")
_WINDOW = 100


@dataclass
class CheckpointMetrics:
    """Counts and seconds of saves by tier, and of loads. `total_stall` is the time that steps waited for saves."""

    saves: dict[str, list[float]] = field(default_factory=dict)  # tier -> [count, seconds, longest]
    total_loads: int = 0
    total_stall: float = 0.0
    async_failures: int = 0
    async_retries: int = 0

    def record_save(self, tier: str, duration: float, stall: float = 0.0) -> None:
        count, total, longest = self.saves.get(tier, (0, 0.0, 0.0))
        self.saves[tier] = [count + 1, total + duration, max(longest, duration)]
        self.total_stall += stall

    def record_load(self, tier: str, duration: float) -> None:
        self.total_loads += 1

    def avg_save_time(self, tier: str | None = None) -> float:
        """Average time of the saves of one tier, or of all."""
        known = [save for name, save in self.saves.items() if tier in (None, name)]
        return sum(total for _, total, _ in known) / max(1, sum(count for count, *_ in known))

    def max_save_time(self) -> float:
        return max((longest for *_, longest in self.saves.values()), default=0.0)

    @property
    def total_saves(self) -> int:
        return int(sum(count for count, *_ in self.saves.values()))


@dataclass(frozen=True)
class RecoveryEvent:
    """One change of the world size; `recovery_time` in seconds."""

    timestamp: float
    old_world_size: int
    new_world_size: int
    recovery_time: float
    checkpoint_tier: str | None = None
    step_resumed: int = 0


@dataclass
class RecoveryMetrics:
    """Counts over the whole run; `events` keeps the last 100."""

    events: deque[RecoveryEvent] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    total_events: int = 0
    total_recovery_time: float = 0.0
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
        self.total_events += 1
        self.total_recovery_time += recovery_time
        self.worker_joins += new_world_size > old_world_size
        self.worker_failures += new_world_size < old_world_size

    @property
    def avg_recovery_time(self) -> float:
        return self.total_recovery_time / max(1, self.total_events)


@dataclass
class GradientMetrics:
    """How often gradients were clipped, and their norms at the last 100 clips."""

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
        return self.clip_count / max(1, self.total_steps)

    @property
    def avg_clip_magnitude(self) -> float:
        return sum(self.clip_magnitudes) / max(1, len(self.clip_magnitudes))


@dataclass
class LRMetrics:
    """Number of learning-rate changes, and the last 100 as (time, old, new, reason)."""

    count: int = 0
    adjustments: deque[tuple[float, float, float, str]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def record_adjustment(self, old_lr: float, new_lr: float, reason: str = "topology_change") -> None:
        self.count += 1
        self.adjustments.append((time.time(), old_lr, new_lr, reason))


@dataclass
class TrainingMetrics:
    """All metrics of a rank. For the time of all ranks see `allranks goodput`."""

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
        self.current_step = step
        self.total_tokens += tokens_processed
        self.loss = loss if loss is not None else self.loss

    def summary(self) -> dict[str, object]:
        """All metrics as plain values, in the documented groups."""
        elapsed = max(self.clock() - self.start_time, 1e-9)
        saves, recovery, gradient = self.checkpoint, self.recovery, self.gradient
        return {
            "training": {
                "elapsed_seconds": elapsed,
                "current_step": self.current_step,
                "total_tokens": self.total_tokens,
                "tokens_per_second": self.total_tokens / elapsed,
                "efficiency": max(0.0, 1.0 - recovery.total_recovery_time / elapsed),
                **({"loss": self.loss} if self.loss is not None else {}),
            },
            "checkpoint": {
                "total_saves": saves.total_saves,
                "total_loads": saves.total_loads,
                "avg_save_time": saves.avg_save_time(),
                "max_save_time": saves.max_save_time(),
                "total_stall": saves.total_stall,
                "async_failures": saves.async_failures,
                "async_retries": saves.async_retries,
            },
            "recovery": {
                **{name: value for name, value in vars(recovery).items() if name != "events"},
                "avg_recovery_time": recovery.avg_recovery_time,
            },
            "gradient": {
                "total_steps": gradient.total_steps,
                "clip_count": gradient.clip_count,
                "clip_frequency": gradient.clip_frequency,
                "avg_clip_magnitude": gradient.avg_clip_magnitude,
            },
            "lr_adjustments": self.lr.count,
        }

    def log_summary(self) -> None:
        """Logs the summary."""
        for group, values in self.summary().items():
            log.info("%s: %s", group, values)
