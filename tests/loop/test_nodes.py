"""Two agents, one job: the one that notices first leads, and has the evidence of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ports import held_port

from allranks.drill import demo_train
from allranks.incidents.folder import read_incidents
from allranks.watch.samples import read_samples

pytestmark = pytest.mark.usefixtures("forks")

TRAIN = """
import sys, torch, torch.distributed as dist, allranks
dist.init_process_group("gloo")
for step in range(60):
    allranks.step(step)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_hang_on_one_node_is_one_incident_with_the_evidence_of_both(tmp_path: Path) -> None:
    """Rank 3 sleeps on node b; the leader has four boxes, names rank 3 and restarts the job, which then ends."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "plan.json").write_text(
        json.dumps({"faults": [{"kind": "hang", "rank": 3, "at_step": 30, "for_s": 0}]})
    )
    rendezvous, lighthouse = held_port(), held_port()
    agents = []
    for name in "ab":
        environment = {
            **os.environ, "ALLRANKS_TOKEN": "t", "ALLRANKS_DIR": str(tmp_path / name), "ALLRANKS_DRILL": str(tmp_path),
            "ALLRANKS_PRELOAD": "allranks.drill.preload",
        }  # fmt: skip
        where = ["--bind" if name == "a" else "--lighthouse", f"127.0.0.1:{lighthouse}"]
        command = [
            sys.executable, "-m", "allranks", "run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{rendezvous}", "--rdzv-id", "two", "--max-restarts", "1", "--notice-s", "3",
            "--recovery", "on", *where, "--incidents", str(tmp_path / f"incidents-{name}"), str(tmp_path / "train.py"),
        ]  # fmt: skip
        with open(tmp_path / f"{name}.log", "w") as log:
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [agent.wait(timeout=250) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    logs = [(tmp_path / f"{name}.log").read_text()[-3000:] for name in "ab"]
    assert (tmp_path / "fired.0").exists(), logs
    assert codes == [0, 0], logs
    stories = [story for name in "ab" for story in read_incidents(tmp_path / f"incidents-{name}")]
    (story,) = [story for story in stories if story["kind"] == "hang"]
    assert story["verdict"]["ranks"] == [3] and "load_batch_from_slow_storage" in story["verdict"]["where"]
    assert story["missing"] == [] and story["action"]["done"]
    folder = Path(story["folder"])
    assert len(list((folder / "boxes").glob("*.box"))) == 4
    assert len(list((folder / "stacks").glob("agent-*/bundle.json"))) == 2


LONG = """
import time, torch, torch.distributed as dist, allranks
dist.init_process_group("gloo")
for step in range(100_000):
    allranks.step(step)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["whole job", "replicas"])
def test_a_node_that_dies_with_its_ranks_is_one_incident_and_the_others_go_on(
    tmp_path: Path, mode: str
) -> None:
    """Node b is killed as by a power cut; node a names it with its ranks and who waited, and trains again."""
    (tmp_path / "train.py").write_text(LONG)
    (tmp_path / "out").mkdir()
    rendezvous, lighthouse = held_port(), held_port()
    agents = []
    for number, name in enumerate("ab"):
        where = ["--bind" if name == "a" else "--lighthouse", f"127.0.0.1:{lighthouse}"]
        whole = [
            "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two", "--max-restarts", "3",
            "--rdzv-endpoint", f"127.0.0.1:{rendezvous}", "--rdzv-conf", f"is_host={name == 'a'}", str(tmp_path / "train.py"),
        ]  # fmt: skip
        replicas = [
            "--replicas", "2", "--first-replica", str(2 * number), "--total-replicas", "4", demo_train.__file__,
            "--steps", "100000", "--pace-s", "0.05", "--out", str(tmp_path / "out"),
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "allranks", "run", *where, "--incidents", str(tmp_path / f"incidents-{name}"),
            *(whole if mode == "whole job" else replicas),
        ]  # fmt: skip
        environment = {**os.environ, "ALLRANKS_TOKEN": "t", "ALLRANKS_DIR": str(tmp_path / name)}
        with open(tmp_path / f"{name}.log", "w") as log:
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        wait_until(
            lambda: [s.step > 20 for name in "ab" for s in read_samples(tmp_path / name)] == [True] * 4, 120
        )
        agents[1].kill()
        wait_until(lambda: "recovered" in str(read_incidents(tmp_path / "incidents-a")), 120)
        wait_until(lambda: "lost node" in str(read_incidents(tmp_path / "incidents-a")), 60)
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(60)
    (story,) = read_incidents(tmp_path / "incidents-a")
    assert (story["kind"], story["ranks"]) == ("death", [2, 3])
    assert story["step"] > 20 and story["closed"] is not None
    if mode == "whole job":  # replicas may be told before they make the next call
        assert "ranks 0, 1 waited in all_reduce" in story["verdict"]["sentence"]


def wait_until(true: Callable[[], bool], limit_s: float) -> None:
    """Looks often, for a limited time."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_second_node_with_the_same_numbers_is_refused_and_the_first_trains_on(tmp_path: Path) -> None:
    """The same command on two nodes: the second ends at its start, names the flag, and starts no rank."""
    port = held_port()
    (tmp_path / "out").mkdir()

    def command(name: str) -> subprocess.Popen[str]:
        where = ["--bind" if name == "a" else "--lighthouse", f"127.0.0.1:{port}"]
        words = [
            sys.executable, "-m", "allranks", "run", *where, "--replicas", "1", "--incidents", str(tmp_path / f"incidents-{name}"),
            demo_train.__file__, "--steps", "100000", "--pace-s", "0.05", "--out", str(tmp_path / "out"),
        ]  # fmt: skip
        environment = {**os.environ, "ALLRANKS_TOKEN": "t", "ALLRANKS_DIR": str(tmp_path / name)}
        log = open(tmp_path / f"{name}.log", "w")  # noqa: SIM115
        with log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log, text=True)

    def steps() -> int:
        return max((sample.step for sample in read_samples(tmp_path / "a")), default=-1)

    first = command("a")
    try:
        wait_until(lambda: steps() > 5, 120)
        second = command("b")
        try:
            assert second.wait(120) == 2
        finally:
            second.kill()
            second.wait()
        text = (tmp_path / "b.log").read_text()
        assert "replica-0 of this job already run" in text and "--first-replica 1" in text, text
        assert not read_samples(tmp_path / "b"), "a rank of the second node was started"
        before = steps()
        wait_until(lambda: steps() > before + 5, 60)
    finally:
        first.terminate()
        first.wait(60)
