"""elastic_harness.metrics"""

from __future__ import annotations

from allranks.elastic.metrics import (
    CheckpointMetrics,
    GradientMetrics,
    LRMetrics,
    RecoveryEvent,
    RecoveryMetrics,
    TrainingMetrics,
)

__all__ = [
    "CheckpointMetrics",
    "GradientMetrics",
    "LRMetrics",
    "RecoveryEvent",
    "RecoveryMetrics",
    "TrainingMetrics",
]
