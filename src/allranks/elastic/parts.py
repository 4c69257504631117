"""From a checked configuration to the parts of a job: one function per part. Runs in a rank."""

from __future__ import annotations

from typing import Any

from allranks.errors import ConfigurationError


def make_checkpoint_config(config: Any) -> Any:
    """The CheckpointConfig of a JobConfig."""
    from allranks.checkpoint import CheckpointConfig

    return CheckpointConfig(**config.checkpoint.model_dump(exclude={"fresh"}))


def make_limits(config: Any, ranks_per_node: int = 1) -> Any:
    """The topology limits of a JobConfig."""
    from allranks.elastic.topology import Limits

    return Limits(config.elastic.min_nodes, config.elastic.max_nodes, ranks_per_node)


def make_scaling(config: Any, optimizer: Any, world_size: int, rank: int) -> Any:
    """The ElasticScalingManager of a JobConfig. The base world is `elastic.base_world_size`, else this one."""
    from allranks.elastic.scaling import ElasticScalingManager, GradAccumulationConfig, ScalingConfig

    base = config.elastic.base_world_size or world_size
    scaling, local = config.scaling, config.training.batch_size
    rates = ScalingConfig(
        config.training.lr,
        local,
        base,
        scaling.scaling_rule,
        scaling.warmup_steps,
        scaling.min_lr,
        scaling.max_lr,
    )
    accumulation = None
    if scaling.strategy == "constant_batch":
        accumulation = GradAccumulationConfig(scaling.target_global_batch_size, local, base, scaling.rounding)
    return ElasticScalingManager(
        rates, accumulation, optimizer, scaling.strategy, rank=rank, world_size=world_size
    )


def make_loader(config: Any, scaling: Any, world_size: int, rank: int) -> Any:
    """The ElasticDataLoader of a JobConfig, dealing what the scaling manager plans."""
    from allranks.elastic.data import ElasticDataLoader, ResumableDataset

    data = config.data
    if not data.index:
        raise ConfigurationError(
            "no token index is named",
            "data.index",
            ["build one: allranks index build FILES -o INDEX", "then name it: data.index: INDEX"],
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
    plan = scaling.accum_manager.plan if scaling is not None and scaling.accum_manager is not None else None
    return ElasticDataLoader(
        dataset,
        config.training.batch_size,
        plan=plan,
        rank=rank,
        world_size=world_size,
        num_workers=data.num_workers,
    )
