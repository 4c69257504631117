"""Elastic training: configuration, topology changes, batch and learning-rate scaling, resumable data, metrics.

Runs in a rank and in `allranks config` and `allranks index`. Names are imported on first use, because reading a
configuration or building an index does not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and IDEs see
    from allranks.elastic.config import JobConfig as JobConfig
    from allranks.elastic.config import ValidationResult as ValidationResult
    from allranks.elastic.config import load_config as load_config
    from allranks.elastic.config import validate_config as validate_config
    from allranks.elastic.config import validate_elastic_config as validate_elastic_config
    from allranks.elastic.config import validate_s3_access as validate_s3_access
    from allranks.elastic.data import DatasetState as DatasetState
    from allranks.elastic.data import ElasticDataLoader as ElasticDataLoader
    from allranks.elastic.data import ResumableDataset as ResumableDataset
    from allranks.elastic.index import BuildRequest as BuildRequest
    from allranks.elastic.index import TokenIndexFile as TokenIndexFile
    from allranks.elastic.index import build_index as build_index
    from allranks.elastic.metrics import TrainingMetrics as TrainingMetrics
    from allranks.elastic.scaling import ElasticScalingManager as ElasticScalingManager
    from allranks.elastic.scaling import GradAccumulationConfig as GradAccumulationConfig
    from allranks.elastic.scaling import GradientAccumulationManager as GradientAccumulationManager
    from allranks.elastic.scaling import LRScalingManager as LRScalingManager
    from allranks.elastic.scaling import RoundingMode as RoundingMode
    from allranks.elastic.scaling import ScalingConfig as ScalingConfig
    from allranks.elastic.scaling import ScalingRule as ScalingRule
    from allranks.elastic.scaling import WarmupScheduler as WarmupScheduler
    from allranks.elastic.scaling import batch_plan as batch_plan
    from allranks.elastic.scaling import create_lr_scheduler_with_warmup as create_lr_scheduler_with_warmup
    from allranks.elastic.topology import ElasticJob as ElasticJob
    from allranks.elastic.topology import Limits as Limits
    from allranks.elastic.topology import TopologyEvent as TopologyEvent
    from allranks.elastic.topology import decide as decide
    from allranks.elastic.world import ElasticTrainingConfig as ElasticTrainingConfig
    from allranks.elastic.world import WorldInfo as WorldInfo
    from allranks.elastic.world import barrier as barrier
    from allranks.elastic.world import broadcast_object as broadcast_object
    from allranks.elastic.world import cleanup_distributed as cleanup_distributed
    from allranks.elastic.world import get_rank as get_rank
    from allranks.elastic.world import get_world_info as get_world_info
    from allranks.elastic.world import get_world_size as get_world_size
    from allranks.elastic.world import is_main_process as is_main_process
    from allranks.elastic.world import setup_distributed_environment as setup_distributed_environment

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


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'allranks.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"allranks.elastic.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
