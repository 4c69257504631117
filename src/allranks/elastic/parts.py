"""Builds the parts of a job from its checked configuration. Runs in a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks.checkpoint.config import CheckpointConfig
from allranks.elastic.data import ElasticDataLoader, ResumableDataset
from allranks.elastic.scaling import (
    ElasticScalingManager,
    GradAccumulationConfig,
    RoundingMode,
    ScalingConfig,
)
from allranks.elastic.topology import Limits
from allranks.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from allranks.elastic.config import JobConfig


def make_checkpoint_config(config: JobConfig) -> CheckpointConfig:
    return CheckpointConfig(
        **{key: value for key, value in vars(config.checkpoint).items() if key != "fresh"}
    )


def make_limits(config: JobConfig, ranks_per_node: int = 1) -> Limits:
    return Limits(config.elastic.min_nodes, config.elastic.max_nodes, ranks_per_node)


def make_scaling(
    config: JobConfig, optimizer: torch.optim.Optimizer, world_size: int, rank: int
) -> ElasticScalingManager:
    """The ElasticScalingManager of a JobConfig. The base world size is `elastic.base_world_size`, else the current one."""
    base = config.elastic.base_world_size or world_size
    scaling, local = config.scaling, config.training.batch_size
    limits = scaling.warmup_steps, scaling.min_lr, scaling.max_lr
    rates = ScalingConfig(config.training.lr, local, base, scaling.scaling_rule, *limits)
    accumulation = None
    if scaling.strategy == "constant_batch":
        rounding = RoundingMode(scaling.rounding)
        accumulation = GradAccumulationConfig(scaling.target_global_batch_size or 0, local, base, rounding)
    return ElasticScalingManager(
        rates, accumulation, optimizer, scaling.strategy, rank=rank, world_size=world_size
    )


def make_loader(
    config: JobConfig, scaling: ElasticScalingManager | None, world_size: int, rank: int
) -> ElasticDataLoader:
    """The ElasticDataLoader of a JobConfig, with the batch plan of the scaling manager."""
    data = config.data
    if not data.index:
        raise ConfigurationError(
            "no token index is configured",
            "data.index",
            ["build one: allranks index build FILES -o INDEX", "then set data.index: INDEX"],
        )
    dataset = ResumableDataset(
        data.index,
        data.seq_length,
        seed=data.seed,
        shuffle=data.shuffle,
        rank=rank,
        world_size=world_size,
        data_files=data.files,
    )
    return ElasticDataLoader(
        dataset,
        config.training.batch_size,
        plan=scaling.plan if scaling is not None else None,
        rank=rank,
        world_size=world_size,
        num_workers=data.num_workers,
    )
