"""Learning rate and batch together, by one of two strategies. Runs in a rank."""

from __future__ import annotations

from typing import Any

from allranks.elastic.scaling.accumulation import GradAccumulationConfig, GradientAccumulationManager
from allranks.elastic.scaling.lr import LRScalingManager
from allranks.elastic.scaling.rules import ScalingConfig
from allranks.errors import ConfigurationError

STRATEGIES = ["variable_batch", "constant_batch"]


class ElasticScalingManager:
    """`constant_batch`: accumulation changes, the rate stays. `variable_batch`: the rate follows the batch.

    `world_size` is the world at the start; without it the base world of the configuration.
    """

    def __init__(
        self,
        lr_config: ScalingConfig,
        accum_config: GradAccumulationConfig | None,
        optimizer: Any,
        strategy: str = "constant_batch",
        *,
        rank: int = 0,
        world_size: int | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigurationError(
                f"Unknown scaling strategy '{strategy}'. Valid options: {STRATEGIES}", "scaling"
            )
        if strategy == "constant_batch" and accum_config is None:
            raise ConfigurationError(
                "target_global_batch_size is required for 'constant_batch' strategy", "scaling"
            )
        self.strategy = strategy
        constant = strategy == "constant_batch"
        self.lr_manager = LRScalingManager(lr_config, optimizer, None if constant else world_size)
        self.accum_manager: GradientAccumulationManager | None = None
        if constant and accum_config is not None:
            self.accum_manager = GradientAccumulationManager(accum_config, rank, world_size)

    @property
    def current_lr(self) -> float:
        return self.lr_manager.current_lr

    @property
    def accumulation_steps(self) -> int:
        return self.accum_manager.accumulation_steps if self.accum_manager else 1

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        if self.accum_manager:
            return self.accum_manager.effective_batch_size
        return self.lr_manager.current_effective_batch_size

    @property
    def loss_scale_factor(self) -> float:
        return self.accum_manager.loss_scale_factor if self.accum_manager else 1.0

    @property
    def world_size(self) -> int:
        return self.accum_manager.world_size if self.accum_manager else self.lr_manager.current_world_size

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per optimizer step of each rank: what the data loader deals out."""
        if self.accum_manager:
            return self.accum_manager.plan.shares
        return (self.lr_manager._current_batch_size,) * self.world_size

    def on_topology_change(self, new_world_size: int, rank: int | None = None) -> dict[str, Any]:
        """Returns the rate that will be reached and this rank's number of micro-batches."""
        if self.accum_manager:
            steps = self.accum_manager.on_topology_change(new_world_size, rank)
            return {"lr": self.lr_manager.current_lr, "accumulation_steps": steps}
        return {"lr": self.lr_manager.on_topology_change(new_world_size), "accumulation_steps": 1}

    def should_step(self) -> bool:
        """To be called after each backward: True when the optimizer is due."""
        return self.accum_manager.should_step() if self.accum_manager else True

    def step_lr(self) -> float:
        """To be called once per optimizer step; moves along a ramp."""
        return self.lr_manager.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "lr": self.lr_manager.state_dict(),
            "accumulation": self.accum_manager.state_dict() if self.accum_manager else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr_manager.load_state_dict(state["lr"])
        if self.accum_manager and state.get("accumulation"):
            self.accum_manager.load_state_dict(state["accumulation"])
