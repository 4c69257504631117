"""How the learning rate follows the batch. Pure.

The rate is always computed from the base configuration, never from the rate before: any sequence of changes
that ends in the same world ends in the same rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from allranks.errors import ConfigurationError


class ScalingRule(Enum):
    """What happens to the rate when the batch is k times as large."""

    LINEAR = "linear"  # k times
    SQRT = "sqrt"  # sqrt(k) times
    NONE = "none"  # nothing


@dataclass(frozen=True)
class ScalingConfig:
    """The rate `base_lr` was chosen for `base_world_size` ranks of `base_batch_size` samples each."""

    base_lr: float
    base_batch_size: int
    base_world_size: int
    scaling_rule: ScalingRule = ScalingRule.LINEAR
    warmup_steps: int = 100  # optimizer steps of the ramp after a change; 0: at once
    min_lr: float = 1e-7
    max_lr: float = 1e-2

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling_rule", ScalingRule(self.scaling_rule))
        for name in ("base_lr", "base_batch_size", "base_world_size"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f"{name} ({getattr(self, name)}) must be positive", f"scaling.{name}"
                )
        if self.warmup_steps < 0:
            raise ConfigurationError(
                f"warmup_steps must be >= 0 (got {self.warmup_steps})", "scaling.warmup_steps"
            )
        if self.min_lr > self.max_lr:
            raise ConfigurationError(
                f"min_lr ({self.min_lr}) cannot exceed max_lr ({self.max_lr})", "scaling"
            )

    @property
    def base_effective_batch_size(self) -> int:
        """Samples per optimizer step of the base configuration."""
        return self.base_batch_size * self.base_world_size


def scaled_lr(rule: ScalingRule, lr: float, old_batch: int, new_batch: int) -> float:
    """The rate for `new_batch` when `lr` was right for `old_batch`."""
    ratio = new_batch / old_batch
    if rule is ScalingRule.LINEAR:
        return lr * ratio
    if rule is ScalingRule.SQRT:
        return lr * math.sqrt(ratio)
    return lr


def target_lr(config: ScalingConfig, effective_batch: int) -> float:
    """The rate for an effective batch, from the base, within [min_lr, max_lr]."""
    lr = scaled_lr(config.scaling_rule, config.base_lr, config.base_effective_batch_size, effective_batch)
    return min(max(lr, config.min_lr), config.max_lr)


@dataclass(frozen=True)
class WarmupScheduler:
    """A straight ramp: `start_lr` at step 0, `target_lr` from step `warmup_steps` on."""

    start_lr: float
    target_lr: float
    warmup_steps: int

    def get_lr(self, step: int) -> float:
        """The rate after `step` steps of the ramp."""
        if step >= self.warmup_steps:
            return self.target_lr
        return self.start_lr + (self.target_lr - self.start_lr) * (max(step, 0) / self.warmup_steps)
