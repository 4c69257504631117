"""Distributes the samples of an optimizer step over ranks and micro-batches. Pure.

The gradient should be the mean over the global batch G. A rank's loss is the mean over a micro-batch of n samples, and data
parallelism averages over W ranks. With a weight of n * W / G for each loss the result is exactly that mean, for any sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class BatchPlan:
    """`micro[rank]` are the sizes of the rank's micro-batches, all positive."""

    micro: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.micro)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return sum(self.shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank per optimizer step."""
        return tuple(sum(sizes) for sizes in self.micro)

    @property
    def uniform(self) -> bool:
        """Whether all ranks have the same number of micro-batches, as required if a forward pass is collective."""
        return len({len(sizes) for sizes in self.micro}) == 1

    def weight(self, rank: int, index: int) -> float:
        """Factor for the mean loss of a micro-batch before backward."""
        return self.micro[rank][index] * self.world_size / self.global_batch


class RoundingMode(str, Enum):
    """What to do if the target is not divisible: round the number of micro-batches, or use uneven sizes."""

    CEIL = "ceil"
    FLOOR = "floor"
    NEAREST = "nearest"
    EXACT = "exact"  # uneven micro-batches; the global batch always equals the target


def batch_plan(
    global_batch: int, world_size: int, local_batch: int, rounding: RoundingMode = RoundingMode.EXACT
) -> BatchPlan:
    """Distributes exactly `global_batch` samples evenly, in micro-batches of at most `local_batch` samples.

    All ranks have the same number of micro-batches, unless one would be empty. With another rounding every micro-batch
    has `local_batch` samples, and the global batch may differ from the target.
    """
    if world_size < 1 or local_batch < 1:
        raise ConfigurationError(
            f"world size ({world_size}) and local batch ({local_batch}) must be positive"
        )
    if rounding is not RoundingMode.EXACT:
        raw = global_batch / (local_batch * world_size) + (0.5 if rounding is RoundingMode.NEAREST else 0.0)
        rounded = math.ceil(raw) if rounding is RoundingMode.CEIL else math.floor(raw)
        return BatchPlan(((local_batch,) * max(1, rounded),) * world_size)
    if global_batch < world_size:
        raise ConfigurationError(
            f"target_global_batch_size ({global_batch}) is smaller than the world size ({world_size}): "
            f"{world_size - global_batch} rank(s) would have no sample",
            "scaling.target_global_batch_size",
        )
    shares = even(global_batch, world_size)
    count = -(-max(shares) // local_batch)
    return BatchPlan(tuple(even(share, min(count, share)) for share in shares))


def even(total: int, parts: int) -> tuple[int, ...]:
    """Splits `total` into parts that differ by at most one, the larger ones first."""
    whole, rest = divmod(total, parts)
    return tuple(whole + (i < rest) for i in range(parts))


StateDict: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class GradAccumulationConfig:
    """With a rounding mode other than exact, every micro-batch has `local_batch_size` samples."""

    target_global_batch_size: int
    local_batch_size: int
    base_world_size: int
    rounding_mode: RoundingMode = RoundingMode.CEIL

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding_mode", RoundingMode(self.rounding_mode))
        need_positive(self, "target_global_batch_size", "local_batch_size", "base_world_size")

    def plan(self, world_size: int) -> BatchPlan:
        """The plan for a world size."""
        return batch_plan(
            self.target_global_batch_size, world_size, self.local_batch_size, self.rounding_mode
        )


def need_positive(config: object, *names: str) -> None:
    """Raises ConfigurationError for the first setting that is not positive."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigurationError(f"{name} ({getattr(config, name)}) must be positive", f"scaling.{name}")


class GradientAccumulationManager:
    """Counts micro-batches and weights their losses.

        for batch in loader:                        # or batches of manager.micro_batch_size samples
            (loss / manager.loss_scale_factor).backward()
            if manager.should_step():
                optimizer.step(); optimizer.zero_grad()

    A checkpoint does not contain partial gradients: after a load or a topology change the window starts again.
    """

    def __init__(self, config: GradAccumulationConfig, rank: int = 0, world_size: int | None = None) -> None:
        self.config = config
        self.rank = rank
        self.plan = config.plan(world_size or config.base_world_size)
        self._index = 0  # of the current micro-batch in its window

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def accumulation_steps(self) -> int:
        return len(self._sizes)

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.plan.global_batch

    @property
    def micro_batch_size(self) -> int:
        """Samples of the current micro-batch."""
        return self._sizes[self._index]

    @property
    def loss_scale_factor(self) -> float:
        """Divide the mean loss of the current micro-batch by it; the number of micro-batches if all are equal."""
        equal = len({size for sizes in self.plan.micro for size in sizes}) == 1 and self.plan.uniform
        return float(len(self._sizes)) if equal else 1.0 / self.plan.weight(self._rank, self._index)

    def should_step(self) -> bool:
        """Whether the window is full. Call it after each backward."""
        self._index += 1
        if self._index < len(self._sizes):
            return False
        self._index = 0
        return True

    def reset(self) -> None:
        """Restarts the window; the caller drops the gradients."""
        self._index = 0

    def on_topology_change(self, new_world_size: int, rank: int | None = None) -> int:
        """Creates the plan for the new world; returns this rank's number of micro-batches."""
        self.plan = self.config.plan(new_world_size)
        self.rank = self.rank if rank is None else rank
        self.reset()
        return self.accumulation_steps

    def state_dict(self) -> StateDict:
        return {
            "world_size": self.world_size,
            "accumulation_steps": self.accumulation_steps,
            "effective_batch_size": self.effective_batch_size,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Uses the world size of the state; call `on_topology_change` afterwards for the current one."""
        self.plan = self.config.plan(int(state["world_size"]))
        self.reset()

    @property
    def _rank(self) -> int:
        # a rank number of the old world may be too large until `on_topology_change` sets the new one
        return min(self.rank, self.world_size - 1)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.plan.micro[self._rank]
