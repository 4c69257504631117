"""What an agent reports of its ranks, once a second."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from allranks.incidents.node_report import BoxFacts, build_report, parse_gpus, step_time
from allranks.incidents.rank_logs import find_logs, tail
from allranks.model.cluster import GpuReport
from allranks.recording import Recorder, RecorderOptions
from allranks.watch.samples import RankSample, read_samples

NOW = 1_800_000_000.0


def sample(rank: int, **facts: object) -> RankSample:
    made = RankSample(rank, 100 + rank, "", True, 7, 14, 14, int((NOW - 60) * 1e9), 0)
    return replace(made, **facts)  # type: ignore[arg-type]


def test_a_rank_that_sleeps_does_not_compute() -> None:
    """One in a call waits; one that ended or died says so; sleeping counts only after a silence."""
    seen = [
        sample(0, calls_started=15), sample(1), sample(2), sample(3, alive=False), sample(4, closed="exit"),
        sample(5, last_ns=int(NOW * 1e9)),
    ]  # fmt: skip
    report = build_report(
        "a", "n", seen, {}, BoxFacts({0: "all_reduce #15"}), (), NOW, asleep=lambda pid: pid in (101, 105)
    )
    assert (
        report.doing == "wscdec"
        and report.places[0] == "all_reduce #15"
        and report.ranks == (0, 1, 2, 3, 4, 5)
    )


def test_the_step_time_is_measured_between_two_reports() -> None:
    """Of one process; a restart counts from its own first step."""
    before, now = sample(0, step=7, step_ns=10**9), sample(0, step=11, step_ns=3 * 10**9)
    assert step_time(before, now) == 0.5
    assert step_time(before, before) == 0.0 == step_time(None, now) == step_time(before, replace(now, pid=9))


def test_gpus_are_read_with_the_processes_that_use_them() -> None:
    """A divided card says [N/A]."""
    rows = [
        ["0", "GPU-a", "97", "61000", "81559", "64", "612.31"],
        ["1", "GPU-b", "[N/A]", "1", "2", "[N/A]", "[N/A]"],
    ]
    assert parse_gpus(rows, {"GPU-a": [4001]}) == (
        GpuReport(0, 97, 61000, 81559, 64, 612, (4001,)),
        GpuReport(1, -1, 1, 2, -1, -1),
    )


def test_the_loss_that_a_script_gives_arrives(tmp_path: Path) -> None:
    """`allranks.step(n, loss=…)` writes it into the black box, which the agent reads."""
    recorder = Recorder(RecorderOptions(folder=tmp_path, rank=3))
    recorder.start()
    try:
        recorder.step(1, loss=2.25)
        recorder.step(2)
        (found,) = read_samples(tmp_path)
        report = build_report("a", "n", [found], {}, BoxFacts(), (), time.time())
        assert (found.step, report.loss) == (2, (2.25,))
    finally:
        recorder.close()


def test_the_last_lines_of_a_rank_come_without_secrets(tmp_path: Path) -> None:
    """From torchrun's folders, the newest attempt, and from those of replicas."""
    for attempt in (0, 1):
        folder = tmp_path / "logs" / "none_x" / f"attempt_{attempt}" / "2"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"attempt {attempt}\npassword=hunter2\n")
    lines = tail(find_logs(tmp_path, 2))
    assert lines[0] == "attempt 1" and "hunter2" not in "".join(lines)
    (tmp_path / "logs" / "rank2.log").write_text("of a replica\n")
    assert tail(find_logs(tmp_path, 2)) == ("of a replica",)
    assert find_logs(tmp_path, 9) == []
