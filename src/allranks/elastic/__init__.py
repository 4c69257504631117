"""Elastic training: the job changes size, the science does not. Runs in a rank (and in `allranks config|index`).

Configuration, topology changes, batch and learning-rate scaling, the token index and resumable data, metrics.
Names are imported on first use: reading a configuration or building an index needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> module that defines it.
_PUBLIC = {
    "JobConfig": "config",
    "ValidationResult": "config",
    "load_config": "config",
    "validate_config": "config",
    "validate_elastic_config": "config",
    "validate_s3_access": "config",
    "DatasetState": "data",
    "ElasticDataLoader": "data",
    "ResumableDataset": "data",
    "BuildRequest": "index",
    "IndexBuilder": "index",
    "TokenIndexFile": "index",
    "build_index": "index",
    "ElasticScalingManager": "scaling",
    "GradAccumulationConfig": "scaling",
    "GradientAccumulationManager": "scaling",
    "LRScalingManager": "scaling",
    "RoundingMode": "scaling",
    "ScalingConfig": "scaling",
    "ScalingRule": "scaling",
    "WarmupScheduler": "scaling",
    "create_lr_scheduler_with_warmup": "scaling",
    "exact_plan": "scaling",
    "ElasticJob": "topology",
    "Limits": "topology",
    "TopologyEvent": "topology",
    "decide": "topology",
    "on_topology_change": "topology",
    "TrainingMetrics": "metrics",
    "WorldInfo": "world",
    "barrier": "world",
    "broadcast_object": "world",
    "cleanup_distributed": "world",
    "get_rank": "world",
    "get_world_info": "world",
    "get_world_size": "world",
    "is_main_process": "world",
    "setup_distributed_environment": "world",
    "ElasticTrainingConfig": "world",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"allranks.elastic.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
