"""Metrics count without growing."""

from __future__ import annotations

import logging

import pytest

from allranks.elastic.metrics import TrainingMetrics


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _run() -> tuple[TrainingMetrics, _Clock]:
    """Ten seconds: six steps of 1 s (one of them done twice), a checkpoint, 1 s of recovery."""
    clock = _Clock()
    metrics = TrainingMetrics(clock=clock)
    for step in (1, 2, 3, 4):
        clock.now += 1.0
        metrics.update_step(step, tokens_processed=1000, loss=3.0 - step / 10)
    clock.now += 1.0
    clock.now += 1.0
    metrics.checkpoint.record_save("nvme", duration=1.5, stall=1.0)
    metrics.checkpoint.record_load("nvme", duration=0.8)
    clock.now += 1.0
    metrics.recovery.record_recovery(4, 3, recovery_time=1.0, checkpoint_tier="nvme", step_resumed=4)
    for step in (4, 5):
        clock.now += 1.0
        metrics.update_step(step, 1000)
    clock.now += 1.0
    metrics.gradient.record_step(clipped=True, grad_norm=2.5)
    metrics.gradient.record_step()
    metrics.lr.record_adjustment(1e-4, 5e-5)
    return metrics, clock


def test_the_documented_summary_is_there() -> None:
    """Groups and keys that people read, with right numbers."""
    metrics, _ = _run()
    summary = metrics.summary()
    assert summary["training"]["current_step"] == 5 and summary["training"]["total_tokens"] == 6000
    assert summary["training"]["tokens_per_second"] == pytest.approx(600)
    assert summary["training"]["efficiency"] == pytest.approx(0.9)
    assert summary["checkpoint"]["total_saves"] == 1 and summary["checkpoint"]["max_save_time"] == 1.5
    assert summary["recovery"] == pytest.approx(
        {
            "total_events": 1,
            "worker_joins": 0,
            "worker_failures": 1,
            "total_recovery_time": 1.0,
            "avg_recovery_time": 1.0,
        }
    )
    assert summary["gradient"]["clip_frequency"] == 0.5 and summary["gradient"]["avg_clip_magnitude"] == 2.5
    assert summary["lr_adjustments"] == 1
    assert metrics.checkpoint.avg_save_time("nvme") == 1.5 and metrics.checkpoint.avg_save_time("s3") == 0.0
    assert metrics.recovery.events[0].checkpoint_tier == "nvme"


def test_a_long_run_does_not_grow() -> None:
    """Windows are bounded; counts go on."""
    metrics = TrainingMetrics()
    for step in range(20_000):
        metrics.update_step(step + 1)
        metrics.recovery.record_recovery(2, 3, 0.0)
        metrics.lr.record_adjustment(1.0, 2.0)
        metrics.checkpoint.record_save("nvme", 0.0)
        metrics.gradient.record_step(clipped=True, grad_norm=1.0)
    assert len(metrics.recovery.events) == 100 and metrics.recovery.total_events == 20_000
    assert len(metrics.lr.adjustments) == 100 and metrics.checkpoint.total_saves == 20_000


def test_the_log_has_the_summary(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each group."""
    metrics, _ = _run()
    with caplog.at_level(logging.INFO, logger="allranks.metrics"):
        metrics.log_summary()
    assert "'current_step': 5" in caplog.text and "'total_saves': 1" in caplog.text
