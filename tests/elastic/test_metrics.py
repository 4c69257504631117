"""Metrics count without growing, and every way out says the same numbers."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from allranks.elastic import metric_sinks
from allranks.elastic.metrics import (
    Goodput,
    JsonLinesSink,
    LogSink,
    TrainingMetrics,
    prometheus_text,
    serve_prometheus,
)


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _run() -> tuple[TrainingMetrics, _Clock]:
    """Ten seconds: six steps of 1 s (one of them done twice), 1 s of data, 1 s of checkpoint, 1 s of recovery."""
    clock = _Clock()
    metrics = TrainingMetrics(clock=clock)
    for step in (1, 2, 3, 4):
        clock.now += 1.0
        metrics.update_step(step, tokens_processed=1000, loss=3.0 - step / 10)
    clock.now += 1.0
    metrics.add_lost("data", 1.0)
    clock.now += 1.0
    metrics.add_lost("checkpoint", 1.0)
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


def test_goodput_says_what_took_the_rest() -> None:
    """Shares sum to one; a step done again counts once, its first time is lost."""
    metrics, clock = _run()
    shares = metrics.goodput.shares(clock.now)
    assert shares == pytest.approx(
        {"useful": 0.5, "checkpoint": 0.1, "data": 0.1, "recovery": 0.1, "redone": 0.1, "other": 0.1}
    )
    assert metrics.goodput.ratio(clock.now) == pytest.approx(0.5)


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
    assert len(metrics.goodput._steps) == 10_000


def test_goodput_of_nothing_is_zero_not_an_error() -> None:
    """No time, no division by it."""
    assert Goodput(5.0).ratio(5.0) == 0.0


def test_json_lines_survive_a_torn_line(tmp_path: Path) -> None:
    """After a crash in the middle of a write the next line is readable."""
    path = tmp_path / "sub" / "metrics.jsonl"
    sink = JsonLinesSink(path)
    metrics, _ = _run()
    sink.write(metrics.summary(), event="start")
    with path.open("a") as file:
        file.write('{"torn')
    sink.write(metrics.summary())
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[0])["event"] == "start"
    assert json.loads(lines[2])["goodput"]["ratio"] == pytest.approx(0.5)


def test_the_log_names_the_thieves(caplog: pytest.LogCaptureFixture) -> None:
    """A person reads goodput and what took the rest."""
    metrics, _ = _run()
    with caplog.at_level(logging.INFO, logger="allranks.metrics"):
        metrics.log_summary()
        LogSink().write(metrics.summary())
    assert (
        "goodput 50.0 %; the rest: checkpoint 10.0%, data 10.0%, recovery 10.0%, redone 10.0%, other 10.0%"
        in caplog.text
    )
    assert "step 5, 600 tokens/s, 90.0 % efficiency" in caplog.text


def test_prometheus_text_has_types_and_labels() -> None:
    """Counters end in _total, labels are escaped."""
    metrics, _ = _run()
    text = prometheus_text(metrics.summary(), {"job": 'a"b', "rank": "0"})
    assert (
        '# TYPE allranks_training_total_tokens_total counter\nallranks_training_total_tokens_total{job="a\\"b",rank="0"} 6000'
        in text
    )
    assert '# TYPE allranks_goodput_ratio gauge\nallranks_goodput_ratio{job="a\\"b",rank="0"} 0.5' in text


def test_prometheus_can_scrape_a_rank() -> None:
    """A real request; anything but /metrics is not found; closing ends the thread."""
    metrics, _ = _run()
    server = serve_prometheus(metrics.summary)
    try:
        base = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
            assert b"allranks_training_tokens_per_second 600" in answer.read()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/", timeout=10)
    finally:
        server.close()


def test_silent_connections_take_few_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest make way, and Prometheus still gets its numbers."""
    monkeypatch.setattr(metric_sinks, "SCRAPE_S", 3600.0)
    before = threading.active_count()
    server = serve_prometheus(_run()[0].summary)
    try:
        with contextlib.ExitStack() as stack:
            crowd = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
                for _ in range(100)
            ]
            assert {one.recv(1) for one in crowd[: -metric_sinks.MAX_SCRAPES]} == {b""}
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=300) as answer:
                assert answer.status == 200
            while threading.active_count() > before + 1 + metric_sinks.MAX_SCRAPES:
                pass  # those whose connections were cut end at once
    finally:
        server.close()


def test_a_request_that_drips_is_cut_off_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it says something."""
    monkeypatch.setattr(metric_sinks, "SCRAPE_S", 0.2)
    server = serve_prometheus(_run()[0].summary)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 60) as slow, pytest.raises(OSError):
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            while True:
                slow.sendall(b"X")
                time.sleep(0.001)
    finally:
        server.close()


def test_tensorboard_gets_event_files(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader, in another process (its writer has threads)."""
    pytest.importorskip("tensorboard")
    code = (
        "import sys\n"
        "from allranks.elastic.metrics import TensorBoardSink, TrainingMetrics\n"
        "metrics = TrainingMetrics(); metrics.update_step(7, 50)\n"
        "sink = TensorBoardSink(sys.argv[1]); sink.write(metrics.summary()); sink.close()\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
        "point = events.Scalars('training/total_tokens')[0]\n"
        "print(point.step, point.value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("7 50.0"), done.stderr


def test_without_tensorboard_the_extra_is_named() -> None:
    """One sentence, no silence."""
    code = (
        "import sys; sys.modules['tensorboard'] = None; sys.modules['torch.utils.tensorboard'] = None\n"
        "from allranks.elastic.metrics import TensorBoardSink\n"
        "TensorBoardSink('/nowhere')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "pip install 'allranks[tensorboard]'" in done.stderr
