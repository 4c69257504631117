"""What training did and what stole its time: counted here, written to logs, JSON lines, TensorBoard, Prometheus."""

from __future__ import annotations

from allranks.elastic.metrics.sinks import (
    JsonLinesSink,
    LogSink,
    TensorBoardSink,
    prometheus_text,
    serve_prometheus,
)
from allranks.elastic.metrics.training import (
    CheckpointMetrics,
    Goodput,
    GradientMetrics,
    LRMetrics,
    RecoveryEvent,
    RecoveryMetrics,
    TrainingMetrics,
)

__all__ = [
    "CheckpointMetrics",
    "Goodput",
    "GradientMetrics",
    "JsonLinesSink",
    "LRMetrics",
    "LogSink",
    "RecoveryEvent",
    "RecoveryMetrics",
    "TensorBoardSink",
    "TrainingMetrics",
    "prometheus_text",
    "serve_prometheus",
]
