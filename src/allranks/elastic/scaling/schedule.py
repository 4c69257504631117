"""The usual schedule: a linear warm-up, then half a cosine down to `min_lr`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def create_lr_scheduler_with_warmup(
    optimizer: Any, warmup_steps: int, total_steps: int, min_lr: float = 0.0
) -> Any:
    """A torch LambdaLR. The first step has 1/warmup_steps of the rate, not zero: no step is wasted."""
    from torch.optim.lr_scheduler import LambdaLR

    groups = optimizer.param_groups
    return LambdaLR(optimizer, [_shape(float(g["lr"]), warmup_steps, total_steps, min_lr) for g in groups])


def _shape(base: float, warmup_steps: int, total_steps: int, min_lr: float) -> Callable[[int], float]:
    """step -> factor of the base rate, for one parameter group."""
    floor = min(min_lr / base, 1.0) if base else 0.0

    def factor(step: int) -> float:
        if step < warmup_steps:
            return max(floor, (step + 1) / warmup_steps)
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return factor
