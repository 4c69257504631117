"""Adapts learning rate and batch to the number of ranks. Runs in a rank.

The rate is always computed from the base configuration and not from the previous rate, so it depends only on the current
world size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from allranks.elastic.batches import (
    BatchPlan,
    GradAccumulationConfig,
    GradientAccumulationManager,
    RoundingMode,
    StateDict,
    batch_plan,
    need_positive,
)
from allranks.errors import ConfigurationError
from allranks.model.options import option

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "BatchPlan",
    "ElasticScalingManager",
    "GradAccumulationConfig",
    "GradientAccumulationManager",
    "LRScalingManager",
    "RoundingMode",
    "ScaledSchedule",
    "ScalingConfig",
    "ScalingRule",
    "WarmupScheduler",
    "batch_plan",
    "create_lr_scheduler_with_warmup",
    "scaled_lr",
]


class ScalingRule(Enum):
    """How the rate changes if the batch is k times as large."""

    LINEAR = "linear"  # times k
    SQRT = "sqrt"  # times sqrt(k)
    NONE = "none"  # unchanged


@dataclass(frozen=True)
class ScalingConfig:
    """`base_lr` is the rate for `base_world_size` ranks with `base_batch_size` samples each."""

    base_lr: float
    base_batch_size: int
    base_world_size: int
    scaling_rule: ScalingRule = option(
        ScalingRule.LINEAR,
        "how the rate follows the batch",
        choices=("linear", "sqrt", "none"),
        title="scaling rule",
    )
    warmup_steps: int = option(
        100, "length of the ramp after a change; 0: no ramp", unit="optimizer steps", at_least=0
    )
    min_lr: float = option(1e-7, "lower limit of the rate", at_least=0)
    max_lr: float = option(1e-2, "upper limit of the rate", above=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling_rule", ScalingRule(self.scaling_rule))
        need_positive(self, "base_lr", "base_batch_size", "base_world_size")
        steps, low, high = self.warmup_steps, self.min_lr, self.max_lr
        if steps < 0:
            raise ConfigurationError(f"warmup_steps must be >= 0 (got {steps})", "scaling.warmup_steps")
        if low > high:
            raise ConfigurationError(f"min_lr ({low}) cannot exceed max_lr ({high})", "scaling")

    @property
    def base_effective_batch_size(self) -> int:
        """Samples per optimizer step in the base configuration."""
        return self.base_batch_size * self.base_world_size


def scaled_lr(rule: ScalingRule, lr: float, old_batch: int, new_batch: int) -> float:
    """The rate for `new_batch`, given the rate `lr` for `old_batch`."""
    ratio = new_batch / old_batch
    if rule is ScalingRule.LINEAR:
        return lr * ratio
    if rule is ScalingRule.SQRT:
        return lr * math.sqrt(ratio)
    return lr


def target_lr(config: ScalingConfig, effective_batch: int) -> float:
    """The rate for an effective batch size, computed from the base and clamped to [min_lr, max_lr]."""
    lr = scaled_lr(config.scaling_rule, config.base_lr, config.base_effective_batch_size, effective_batch)
    return min(max(lr, config.min_lr), config.max_lr)


@dataclass(frozen=True)
class WarmupScheduler:
    """A linear ramp: `start_lr` at step 0, `target_lr` from step `warmup_steps` on."""

    start_lr: float
    target_lr: float
    warmup_steps: int

    def get_lr(self, step: int) -> float:
        """The rate after `step` steps of the ramp."""
        if step >= self.warmup_steps:
            return self.target_lr
        return self.start_lr + (self.target_lr - self.start_lr) * (max(step, 0) / self.warmup_steps)


class LRScalingManager:
    """Sets the rate for the current world size, with a ramp after each change.

    Parameter groups keep their ratio to the first one. Without `world_size` the job starts in the base configuration; with
    it, the rate is set for that world size immediately. Pass a schedule of the script through `wrap`, so that the two do
    not overwrite each other.
    """

    def __init__(
        self, config: ScalingConfig, optimizer: torch.optim.Optimizer, world_size: int | None = None
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self._current_world_size = world_size or config.base_world_size
        self._current_batch_size = config.base_batch_size
        first = optimizer.param_groups[0]["lr"]
        self._shares = [
            float(group["lr"]) / float(first) if first else 1.0 for group in optimizer.param_groups
        ]
        self._unscaled: list[float] | None = None  # rates of a wrapped schedule, per group
        self._ramp: WarmupScheduler | None = None
        self._ramp_step = 0
        self._lr = config.base_lr
        if world_size is not None:
            self._lr = self._target()
            self._write()

    @property
    def current_lr(self) -> float:
        """The current rate of the first group, without a wrapped schedule."""
        return self._lr

    @property
    def factor(self) -> float:
        """Factor for the rates of a wrapped schedule."""
        return self._lr / self.config.base_lr

    @property
    def current_world_size(self) -> int:
        return self._current_world_size

    @property
    def current_effective_batch_size(self) -> int:
        return self._current_batch_size * self._current_world_size

    @property
    def is_warming_up(self) -> bool:
        return self._ramp is not None

    def get_scaled_lr(self, base_lr: float, old_effective_batch: int, new_effective_batch: int) -> float:
        """The rate by this manager's rule, not clamped."""
        return scaled_lr(self.config.scaling_rule, base_lr, old_effective_batch, new_effective_batch)

    def on_topology_change(self, new_world_size: int, batch_size: int | None = None) -> float:
        """Starts the ramp from the current rate to that of the new world; returns the target rate."""
        if new_world_size < 1:
            raise ValueError(f"a world of {new_world_size} ranks cannot train")
        self._current_world_size = new_world_size
        self._current_batch_size = batch_size or self._current_batch_size
        target = self._target()
        if target == (self._ramp.target_lr if self._ramp else self._lr):
            return target
        if self.config.warmup_steps == 0:
            self._ramp, self._lr = None, target
            self._write()
        else:
            self._ramp = WarmupScheduler(self._lr, target, self.config.warmup_steps)
            self._ramp_step = 0
        return target

    def step(self) -> float:
        """Advances the ramp and returns the rate. Call it once per optimizer step."""
        if self._ramp is not None:
            self._ramp_step += 1
            self._lr = self._ramp.get_lr(self._ramp_step)
            if self._ramp_step >= self._ramp.warmup_steps:
                self._ramp = None
            self._write()
        return self._lr

    def wrap(self, scheduler: LRScheduler) -> ScaledSchedule:
        """Wraps a torch scheduler, so that its rates are multiplied by this manager's factor."""
        return ScaledSchedule(scheduler, self)

    def state_dict(self) -> StateDict:
        """Plain numbers, including a running ramp."""
        ramp = self._ramp
        return {
            "current_lr": self._lr,
            "current_world_size": self._current_world_size,
            "current_batch_size": self._current_batch_size,
            "warmup_step": self._ramp_step if ramp else 0,
            "warmup_steps": ramp.warmup_steps if ramp else 0,
            "warmup_start_lr": ramp.start_lr if ramp else self._lr,
            "warmup_target_lr": ramp.target_lr if ramp else self._lr,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restores the state, also in the middle of a ramp, and sets the optimizer's rate."""
        self._lr = float(state["current_lr"])
        self._current_world_size = int(state["current_world_size"])
        self._current_batch_size = int(state.get("current_batch_size", self._current_batch_size))
        steps = int(state.get("warmup_steps", 0))
        self._ramp_step = int(state.get("warmup_step", 0))
        self._ramp = None
        if steps:
            start, target = float(state["warmup_start_lr"]), float(state["warmup_target_lr"])
            self._ramp = WarmupScheduler(start, target, steps)
        self._write()

    def _target(self) -> float:
        return target_lr(self.config, self.current_effective_batch_size)

    def _write(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            if self._unscaled is not None:
                group["lr"] = self._unscaled[i] * self.factor
            else:
                group["lr"] = self._lr * self._shares[i]


class ScaledSchedule:
    """A torch scheduler that steps on the unscaled rates.

    The result is `schedule(step) * factor`, both for schedulers that multiply the group's rate and for those that compute
    it from `initial_lr`.
    """

    def __init__(self, scheduler: LRScheduler, manager: LRScalingManager) -> None:
        self.scheduler = scheduler
        self._manager = manager
        self._take()

    def step(self, *args: object, **kwargs: object) -> None:
        manager = self._manager
        for group, lr in zip(manager.optimizer.param_groups, manager._unscaled or [], strict=True):
            group["lr"] = lr
        self.scheduler.step(*args, **kwargs)
        self._take()

    def get_last_lr(self) -> list[float]:
        """The current rates of the optimizer."""
        return [float(group["lr"]) for group in self._manager.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        return {"scheduler": self.scheduler.state_dict(), "unscaled": list(self._manager._unscaled or [])}

    def load_state_dict(self, state: StateDict) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self._manager._unscaled = [float(lr) for lr in state["unscaled"]]
        self._manager._write()

    def _take(self) -> None:
        self._manager._unscaled = self.get_last_lr()
        self._manager._write()


def create_lr_scheduler_with_warmup(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, min_lr: float = 0.0
) -> LRScheduler:
    """A LambdaLR with linear warm-up and cosine decay. The first step has 1/warmup_steps of the rate, not zero."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(floor: float, step: int) -> float:
        """Factor for the base rate of one parameter group."""
        if step < warmup_steps:
            return max(floor, (step + 1) / warmup_steps)
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    rates = [float(group["lr"]) for group in optimizer.param_groups]
    floors = [min(min_lr / rate, 1.0) if rate else 0.0 for rate in rates]
    return LambdaLR(optimizer, [partial(factor, floor) for floor in floors])


STRATEGIES = ["variable_batch", "constant_batch"]


class ElasticScalingManager:
    """Strategy `constant_batch` adapts the accumulation and keeps the rate; `variable_batch` adapts the rate.

    `world_size` is the world size at the start (default: the base world size).
    """

    def __init__(
        self,
        lr_config: ScalingConfig,
        accum_config: GradAccumulationConfig | None,
        optimizer: torch.optim.Optimizer,
        strategy: str = "constant_batch",
        *,
        rank: int = 0,
        world_size: int | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            text = f"Unknown scaling strategy '{strategy}'. Valid options: {STRATEGIES}"
            raise ConfigurationError(text, "scaling")
        constant = strategy == "constant_batch"
        if constant and accum_config is None:
            text = "target_global_batch_size is required for 'constant_batch' strategy"
            raise ConfigurationError(text, "scaling")
        self.strategy = strategy
        self.lr_manager = LRScalingManager(lr_config, optimizer, None if constant else world_size)
        # without a target each rank has one micro-batch
        own = lr_config.base_batch_size, lr_config.base_world_size, RoundingMode.FLOOR
        batches = accum_config if constant and accum_config else GradAccumulationConfig(1, *own)
        self._batches = GradientAccumulationManager(batches, rank, world_size)
        self.accum_manager = self._batches if constant else None

    @property
    def current_lr(self) -> float:
        return self.lr_manager.current_lr

    @property
    def accumulation_steps(self) -> int:
        return self._batches.accumulation_steps

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._batches.effective_batch_size

    @property
    def loss_scale_factor(self) -> float:
        return self._batches.loss_scale_factor

    @property
    def world_size(self) -> int:
        return self._batches.world_size

    @property
    def plan(self) -> BatchPlan | None:
        """The distribution of each step's samples; None if every rank has its own batch."""
        return self.accum_manager.plan if self.accum_manager else None

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank per optimizer step."""
        return self._batches.plan.shares

    def on_topology_change(self, new_world_size: int, rank: int | None = None) -> StateDict:
        """Returns the target rate and this rank's number of micro-batches."""
        steps = self._batches.on_topology_change(new_world_size, rank)
        constant = self.strategy == "constant_batch"
        lr = self.current_lr if constant else self.lr_manager.on_topology_change(new_world_size)
        return {"lr": lr, "accumulation_steps": steps}

    def should_step(self) -> bool:
        """Whether the optimizer step is due. Call it after each backward."""
        return self._batches.should_step()

    def step_lr(self) -> float:
        """Advances a ramp. Call it once per optimizer step."""
        return self.lr_manager.step()

    def state_dict(self) -> StateDict:
        return {
            "strategy": self.strategy,
            "lr": self.lr_manager.state_dict(),
            "accumulation": self._batches.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.lr_manager.load_state_dict(state["lr"])
        if state.get("accumulation"):
            self._batches.load_state_dict(state["accumulation"])
