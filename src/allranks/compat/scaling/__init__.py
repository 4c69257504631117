"""elastic_harness.scaling"""

from __future__ import annotations

from allranks.elastic.scaling import (
    ElasticScalingManager,
    GradAccumulationConfig,
    GradientAccumulationManager,
    LRScalingManager,
    RoundingMode,
    ScalingConfig,
    ScalingRule,
    WarmupScheduler,
    create_lr_scheduler_with_warmup,
)

__all__ = [
    "ElasticScalingManager",
    "GradAccumulationConfig",
    "GradientAccumulationManager",
    "LRScalingManager",
    "RoundingMode",
    "ScalingConfig",
    "ScalingRule",
    "WarmupScheduler",
    "create_lr_scheduler_with_warmup",
]
