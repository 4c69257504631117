"""What an agent reports of its ranks, once a second."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from allranks.incidents.node_report import BoxFacts, build_report, parse_gpus, step_time, work_of
from allranks.incidents.rank_logs import find_logs, tail
from allranks.lighthouse.ranks import RankTable
from allranks.model.cluster import GpuReport
from allranks.model.job_state import JobFacts, StepWork, describe
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


def test_ranks_of_several_worlds_are_reported_by_role_and_number() -> None:
    """Two processes are rank 0 of their worlds; a job of one world has no names."""
    seen = [sample(0, name="trainer 0"), sample(1, name="rollout 0")]
    table = RankTable()
    table.note(build_report("a", "n", seen, {}, BoxFacts(), (), NOW), NOW)
    (node,) = table.nodes()["nodes"]  # type: ignore[misc]
    assert node["names"] == ("trainer 0", "rollout 0")
    assert (table.detail(1, ()) or {})["name"] == "rollout 0"
    assert build_report("a", "n", [sample(0)], {}, BoxFacts(), (), NOW).names == ()


def test_the_step_time_is_measured_between_two_reports() -> None:
    """Of one process; a restart counts from its own first step."""
    before, now = sample(0, step=7, step_ns=10**9), sample(0, step=11, step_ns=3 * 10**9)
    assert step_time(before, now) == 0.5
    assert step_time(before, before) == 0.0 == step_time(None, now) == step_time(before, replace(now, pid=9))


def test_gpus_are_read_with_the_processes_that_use_them() -> None:
    """A divided card says [N/A]."""
    rows = [
        ["0", "GPU-a", "97", "61000", "81559", "64", "612.31", "NVIDIA H100 80GB HBM3"],
        ["1", "GPU-b", "[N/A]", "1", "2", "[N/A]", "[N/A]", "NVIDIA A100"],
    ]
    assert parse_gpus(rows, {"GPU-a": [4001]}) == (
        GpuReport(0, 97, 61000, 81559, 64, 612, (4001,), "NVIDIA H100 80GB HBM3"),
        GpuReport(1, -1, 1, 2, -1, -1, (), "NVIDIA A100"),
    )


def test_the_work_of_a_step_and_the_peak_of_one_gpu_for_each_rank() -> None:
    """GPUs of two kinds, or of one that is not known: no peak. A dead rank does nothing."""
    ranks = [
        sample(0, tokens=4096.0, flops=2e12),
        sample(1, tokens=4096.0, flops=2e12),
        sample(2, tokens=1.0, alive=False),
    ]
    cards = {
        name: GpuReport(0, name=name) for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "Tesla T4")
    }
    pcie, sxm, unknown = cards.values()
    assert work_of(ranks, [sxm]) == StepWork(8192.0, 4e12, 2 * 989e12)
    assert work_of(ranks, [pcie, pcie]).peak == 2 * 756e12
    assert work_of(ranks, [sxm, pcie]).peak == work_of(ranks, [unknown]).peak == work_of(ranks, []).peak == 0
    facts = JobFacts(step=7, steps_per_s=100.0, begun=True, work=work_of(ranks, [sxm]))
    assert describe(facts).text == "Training: step 7, 100 steps/s, 819,200 tokens/s, MFU 20%"
    assert describe(replace(facts, work=StepWork())).text == "Training: step 7, 100 steps/s"


def test_marks_of_one_step_are_added_up(tmp_path: Path) -> None:
    """The box has the last whole step; what is not a number costs the number, not the training."""
    recorder = Recorder(RecorderOptions(folder=tmp_path, rank=3))
    recorder.start()
    try:
        seen = []
        for step, tokens in ((1, 100), (2, 10), (2, 20), (2, 30), (3, 7), (4, "many")):
            recorder.step(step, tokens=tokens, flops=2.0)  # type: ignore[arg-type]
            (found,) = read_samples(tmp_path)
            seen.append((found.step, found.tokens, found.flops))
        assert seen == [(1, 100, 2), (2, 100, 2), (2, 100, 2), (2, 100, 2), (3, 60, 6), (4, 60, 6)]
    finally:
        recorder.close()


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
