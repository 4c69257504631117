"""Batch and learning rate when the number of ranks changes. Runs in a rank; the arithmetic is pure."""

from __future__ import annotations

from allranks.elastic.scaling.accumulation import (
    GradAccumulationConfig,
    GradientAccumulationManager,
    RoundingMode,
)
from allranks.elastic.scaling.lr import LRScalingManager, ScaledSchedule, create_lr_scheduler_with_warmup
from allranks.elastic.scaling.manager import ElasticScalingManager
from allranks.elastic.scaling.plan import BatchPlan, exact_plan, rounded_plan
from allranks.elastic.scaling.rules import ScalingConfig, ScalingRule, WarmupScheduler, scaled_lr

__all__ = [
    "BatchPlan",
    "ElasticScalingManager",
    "GradAccumulationConfig",
    "GradientAccumulationManager",
    "LRScalingManager",
    "RoundingMode",
    "ScaledSchedule",
    "ScalingConfig",
    "ScalingRule",
    "WarmupScheduler",
    "create_lr_scheduler_with_warmup",
    "exact_plan",
    "rounded_plan",
    "scaled_lr",
]
