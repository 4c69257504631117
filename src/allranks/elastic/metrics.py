"""The metrics of a rank: what training did and what took its time. Everything is a counter, a sum or a short window: nothing grows with the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from allranks.elastic.metric_sinks import (
    JsonLinesSink,
    LogSink,
    Summary,
    TensorBoardSink,
    prometheus_text,
    serve_prometheus,
)

__all__ = [
    "CheckpointMetrics",
    "Goodput",
    "GradientMetrics",
    "JsonLinesSink",
    "LRMetrics",
    "LogSink",
    "RecoveryEvent",
    "RecoveryMetrics",
    "TensorBoardSink",
    "TrainingMetrics",
    "prometheus_text",
    "serve_prometheus",
]

_WINDOW = 100
_REMEMBERED = 10_000  # step times kept for `redo`


@dataclass
class Goodput:
    """Useful time over all time, and what took the rest: seconds by name. Time that nobody claimed is "other".

    A step that is done again after a restore was useless the first time: `redo` moves its time to "redone".
    """

    started_s: float = 0.0
    useful_s: float = 0.0
    lost_s: dict[str, float] = field(default_factory=dict)  # checkpoint, recovery, data, redone, ...
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add_step(self, step: int, seconds: float) -> None:
        self.useful_s += seconds
        self._steps.append((step, seconds))

    def add_lost(self, what: str, seconds: float) -> None:
        """Time in which nothing was learned."""
        self.lost_s[what] = self.lost_s.get(what, 0.0) + seconds

    def redo(self, from_step: int) -> None:
        """Training goes back: steps from `from_step` on will be done again."""
        while self._steps and self._steps[-1][0] >= from_step:
            _, seconds = self._steps.pop()
            self.useful_s -= seconds
            self.add_lost("redone", seconds)

    def shares(self, now_s: float) -> dict[str, float]:
        """What part of all time went where; "useful" first, they sum to 1."""
        total = max(now_s - self.started_s, 1e-9)
        named = {"useful": self.useful_s, **dict(sorted(self.lost_s.items()))}
        named["other"] = max(0.0, total - sum(named.values()))
        return {what: seconds / total for what, seconds in named.items()}

    def ratio(self, now_s: float) -> float:
        return self.useful_s / max(now_s - self.started_s, 1e-9)


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
    on_record: Callable[[RecoveryEvent], None] | None = None

    def record_recovery(
        self,
        old_world_size: int,
        new_world_size: int,
        recovery_time: float,
        checkpoint_tier: str | None = None,
        step_resumed: int = 0,
    ) -> None:
        sizes = (old_world_size, new_world_size)
        event = RecoveryEvent(time.time(), *sizes, recovery_time, checkpoint_tier, step_resumed)
        self.events.append(event)
        self.timer.add(recovery_time)
        self.worker_joins += new_world_size > old_world_size
        self.worker_failures += new_world_size < old_world_size
        if self.on_record is not None:
            self.on_record(event)

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
    """All of it. `clock` is monotonic seconds; the time between two `update_step` calls is that step's."""

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
        self.goodput = Goodput(self.start_time)
        self._mark_s = self.start_time  # up to here time is accounted for
        self.recovery.on_record = lambda event: self.add_lost("recovery", event.recovery_time)

    def update_step(self, step: int, tokens_processed: int = 0, loss: float | None = None) -> None:
        """A step is done. A step number that is not larger than before is one that is done again."""
        now = self.clock()
        if step <= self.current_step:
            self.goodput.redo(step)
        self.goodput.add_step(step, max(0.0, now - self._mark_s))
        self._mark_s = now
        self.current_step = step
        self.total_tokens += tokens_processed
        self.loss = loss if loss is not None else self.loss

    def add_lost(self, what: str, seconds: float) -> None:
        """That part of the time since the last step was no training: "data", "checkpoint", "evaluation" ..."""
        now = self.clock()
        seconds = min(max(0.0, seconds), now - self._mark_s)
        self.goodput.add_lost(what, seconds)
        self._mark_s += seconds

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

    def summary(self) -> Summary:
        """Everything as plain values, in the documented groups."""
        shares = self.goodput.shares(self.clock())
        recovery = "total_events worker_joins worker_failures total_recovery_time avg_recovery_time"
        return {
            "training": {
                "elapsed_seconds": self.training_time,
                **_named(self, "current_step total_tokens tokens_per_second"),
                "efficiency": self.training_efficiency,
                **({"loss": self.loss} if self.loss is not None else {}),
            },
            "goodput": {"ratio": shares["useful"], **{f"share_{k}": part for k, part in shares.items()}},
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
        """Three lines into the log."""
        LogSink().write(self.summary())


def _named(source: object, names: str) -> dict[str, object]:
    """Attributes, and what methods return, by their names."""
    found = {name: getattr(source, name) for name in names.split()}
    return {name: value() if callable(value) else value for name, value in found.items()}
