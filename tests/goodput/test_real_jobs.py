"""Two small real jobs with planted losses: what the ledger books is what was planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lighthouse.waiting import eventually

pytestmark = pytest.mark.usefixtures("forks")

JOB = Path(__file__).parent.parent.parent / "benchmarks" / "_goodput_job.py"


def run_job(folder: Path, *words: str) -> str:
    started = start_job(folder, *words)
    output, _ = started.communicate(timeout=240)
    assert started.returncode == 0, output
    return output


def start_job(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "ALLRANKS_DIR": str(folder / "boxes"),
        "ALLRANKS_HISTORY": str(folder / "history"),
    }
    command = [sys.executable, "-m", "allranks", "run", "--job", "planted", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def account_of(folder: Path) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "allranks", "goodput", "allranks-incidents", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def planted(output: str, state: str) -> float:
    lines = [line.split("PLANTED ")[1].split() for line in output.splitlines() if "PLANTED" in line]
    return sum(float(words[2]) for words in lines if words[1] == state)


def check_sum(found: dict[str, dict[str, float]], ranks: int) -> None:
    wall = float(found["running_s"]) * ranks  # type: ignore[arg-type]
    assert sum(found["rank_seconds"].values()) == pytest.approx(wall, rel=0.005)


@pytest.mark.timeout(300)
def test_a_whole_job_that_is_killed_saves_evaluates_and_has_a_slow_rank(tmp_path: Path) -> None:
    script = [
        str(JOB),
        "--steps",
        "60",
        "--step-s",
        "0.05",
        "--slow-rank",
        "1",
        "--slow-s",
        "0.1",
        "--kill-at",
        "36",
    ]
    script += [
        "--save-every",
        "10",
        "--save-s",
        "0.2",
        "--eval-at",
        "20",
        "--eval-s",
        "1.0",
        "--state",
        str(tmp_path / "saved"),
    ]
    output = run_job(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *script)
    assert "PLANTED 0 kill" in output
    found = account_of(tmp_path)
    seconds = found["rank_seconds"]
    check_sum(found, 2)
    assert seconds["saving"] == pytest.approx(planted(output, "saving"), abs=0.5)
    assert seconds["evaluation"] == pytest.approx(planted(output, "evaluation"), abs=0.5)
    assert seconds["waiting"] == pytest.approx(0.1 * 66, abs=1.5)  # 60 steps, and 6 of them twice
    assert found["waiting_for"][0]["rank"] == 1  # type: ignore[index]
    # steps 31-35; step 30 is the first of its process
    assert seconds["repeated"] == pytest.approx(2 * 5 * 0.15, abs=0.8)
    assert seconds["stalled"] > 0
    assert found["failures"] == 1
    assert "[allranks] goodput " in output
    assert (tmp_path / "history").exists()


@pytest.mark.timeout(300)
def test_a_replica_that_dies_heals_and_the_others_continue(tmp_path: Path) -> None:
    script = [str(JOB), "--steps", "120", "--step-s", "0.05", "--kill-at", "20", "--kill-rank", "2"]
    output = run_job(tmp_path, "--replicas", "3", *script)
    assert "PLANTED 2 kill" in output
    found = account_of(tmp_path)
    seconds = found["rank_seconds"]
    check_sum(found, 3)
    assert seconds["repeated"] < 0.5
    assert seconds["useful"] > 3 * 120 * 0.05 * 0.6
    assert seconds["stalled"] + seconds["starting"] > 1.0
    assert found["failures"] == 1 and found["step"] == 119


@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_slow, looks", [("report", range(5, 6)), ("profile", range(6, 41))])
def test_a_rank_that_becomes_slow_is_an_incident_with_the_line_that_it_is_at(
    tmp_path: Path, on_slow: str, looks: range
) -> None:
    (tmp_path / "job.yaml").write_text(f"recovery:\n  on_slow: {on_slow}\n")
    slow = ["--slow-rank", "1", "--slow-s", "0.05", "--slow-at", "60"]
    script = [str(JOB), "--steps", "2000", "--step-s", "0.05", *slow, "--until", "noticed"]
    launch = ["--config", "job.yaml", "--standalone", "--nproc-per-node", "2"]
    job = start_job(tmp_path, *launch, *script)
    found = tmp_path / "allranks-incidents"

    def closed() -> list[Path]:
        return [path for path in found.glob("*/incident.json") if json.loads(path.read_text())["closed"]]

    try:
        eventually(lambda: closed() or job.poll() is not None, 200.0)
    finally:
        (tmp_path / "noticed").touch()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    (path,) = closed()
    incident, stacks = json.loads(path.read_text()), path.parent / "slow_stacks.txt"
    assert (incident["kind"], incident["ranks"]) == ("slow", [1])
    lines = stacks.read_text().splitlines()
    assert all("_goodput_job.py" in line for line in lines)
    assert sum(int(line.rpartition(" ")[2]) for line in lines) in looks
    assert "rank 1 became slow" in incident["reason"] and "rank 1 became slow" in output
    assert incident["action"]["kind"] == "none"  # neither ends anything
    assert account_of(tmp_path)["rank_seconds"]["stalled"] == 0  # slow is not stalled


@pytest.mark.everything
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "on_slow, kind, said", [("swap", "evict", "is restarted"), ("evict", "set_aside", "set aside")]
)
def test_a_slow_replica_is_replaced_or_left_out(tmp_path: Path, on_slow: str, kind: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(f"recovery:\n  on_slow: {on_slow}\n")
    script = [
        str(JOB),
        "--steps",
        "300",
        "--step-s",
        "0.1",
        "--slow-rank",
        "1",
        "--slow-s",
        "0.1",
        "--slow-at",
        "60",
    ]
    run_job(tmp_path, "--config", "job.yaml", "--replicas", "3", *script)
    incidents = [
        json.loads(path.read_text()) for path in (tmp_path / "allranks-incidents").glob("*/incident.json")
    ]
    (slow,) = [one for one in incidents if one["kind"] == "slow"]
    assert (slow["ranks"], slow["action"]["kind"], slow["action"]["done"]) == ([1], kind, True)
    assert said in slow["action"]["result"]
    assert not [
        one for one in incidents if one["kind"] in ("death", "hang")
    ]  # what was asked for is not an incident
    assert account_of(tmp_path)["step"] == 299
