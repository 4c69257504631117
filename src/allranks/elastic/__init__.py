"""Elastic training: the job changes size, the science does not. Runs in a rank (and in `allranks config|index`).

Configuration, topology changes, batch and learning-rate scaling, the token index and resumable data, metrics.
Names are imported on first use: reading a configuration or building an index needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

# Module -> the public names that it defines.
_MODULES = {
    "config": "JobConfig ValidationResult load_config validate_config validate_elastic_config "
    "validate_s3_access",
    "data": "DatasetState ElasticDataLoader ResumableDataset",
    "index": "BuildRequest TokenIndexFile build_index",
    "scaling": "ElasticScalingManager GradAccumulationConfig GradientAccumulationManager LRScalingManager "
    "RoundingMode ScalingConfig ScalingRule WarmupScheduler batch_plan create_lr_scheduler_with_warmup",
    "topology": "ElasticJob Limits TopologyEvent decide",
    "metrics": "TrainingMetrics",
    "world": "ElasticTrainingConfig WorldInfo barrier broadcast_object cleanup_distributed get_rank "
    "get_world_info get_world_size is_main_process setup_distributed_environment",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"allranks.elastic.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
