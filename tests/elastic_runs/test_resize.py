"""Nodes leave and come back: the job changes size, the science does not. Three agents on one machine, real etcd, default settings."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allranks.testing.ranks import free_port

from .conftest import LAST
from .jobs import Job, assert_same_run, gone, listening, parent_of

pytestmark = pytest.mark.timeout(600)  # for hanging only

PHASES = {"stop", "decide", "rescale", "restore", "data", "go"}


@dataclass(frozen=True)
class Meeting:
    """Where the agents meet; everything else is what a user gets who sets nothing."""

    backend: str
    endpoint: str

    def flags(self, nodes: str) -> list[str]:
        return [
            "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "30", "--rdzv-backend", self.backend,
            "--rdzv-endpoint", self.endpoint, "--rdzv-id", "resize", "--local-addr", "127.0.0.1",
        ]  # fmt: skip

    def host(self, job: Job, ranks: list[dict[str, Any]]) -> subprocess.Popen[bytes]:
        """The agent whose death takes a store with it: the rendezvous' own, or that of the process group."""
        if self.backend == "c10d":
            port = int(self.endpoint.rpartition(":")[2])
            return next(agent for agent in job.agents if port in listening(agent.pid))
        return _agent_of(job, ranks, 0)


@pytest.fixture(params=["etcd-v3", "c10d"])
def meeting(request: pytest.FixtureRequest) -> Meeting:
    if request.param == "c10d":
        return Meeting("c10d", f"127.0.0.1:{free_port()}")
    return Meeting("etcd-v3", request.getfixturevalue("etcd"))


def _agent_of(job: Job, ranks: list[dict[str, Any]], rank: int) -> subprocess.Popen[bytes]:
    parent = parent_of(next(row["pid"] for row in ranks if row["rank"] == rank))
    return next(agent for agent in job.agents if agent.pid == parent)


def _kill_node(job: Job, agent: subprocess.Popen[bytes], ranks: list[dict[str, Any]]) -> None:
    """kill -9 of an agent; its rank, and what that has started, must go with it."""
    left = [(row["pid"], row["child"]) for row in ranks if parent_of(row["pid"]) == agent.pid]
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait(60)
    job.agents.remove(agent)
    job.wait("the end of the killed node's rank", lambda: all(gone(pid) for pids in left for pid in pids))


def test_three_nodes_two_nodes_three_nodes(
    tmp_path: Path, meeting: Meeting, undisturbed: list[float]
) -> None:
    """The node that hosts the store is killed, another one comes: same batches, same samples, same losses."""
    with Job(tmp_path / "job", LAST, *meeting.flags("2:3")) as job:
        for _ in range(3):
            job.add()
        three = job.wait_for_world(3)
        job.gate(LAST - 20)
        job.wait_for_step(10, world=3)
        known = len(job.events())
        _kill_node(job, meeting.host(job, three), three)
        two = job.wait_for_world(2, after=known)
        assert {(row["restored"], row["tier"]) for row in two} == {("checkpoint", "PEER")}
        assert {row["old_world_size"] for row in two} == {3}
        job.wait_for_step(LAST - 20, world=2)
        known = len(job.events())
        job.add()
        again = job.wait_for_world(3, after=known)
        assert {(row["restored"], row["tier"]) for row in again} == {("checkpoint", "PEER")}
        job.gate(LAST)
        assert job.wait_for_end() == [0, 0, 0], job.output()
    assert {row["global_batch_size"] for row in job.events()} == {12}
    assert all(set(row["durations_s"]) == PHASES for row in job.events())
    assert_same_run(job, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_restart_and_scale_up_succeed_twenty_of_twenty_times(
    tmp_path: Path, meeting: Meeting, part: int
) -> None:
    """Five times in each part a rank is killed, then a node, the stores' hosts among them, and another node comes."""
    with Job(tmp_path / "job", 10_000, *meeting.flags("1:2")) as job:
        job.add()
        job.add()
        ranks = job.wait_for_world(2)
        for round_ in range(5):
            job.gate(10 * round_ + 5)
            job.wait_for_step(10 * round_ + 5, world=2)
            known = len(job.events())
            os.kill(ranks[(part + round_) % 2]["pid"], signal.SIGKILL)
            ranks = job.wait_for_world(2, after=known)
            job.gate(10 * round_ + 10)
            job.wait_for_step(10 * round_ + 10, world=2)
            known = len(job.events())
            victim = meeting.host(job, ranks) if round_ % 2 else _agent_of(job, ranks, (part + round_) % 2)
            _kill_node(job, victim, ranks)
            job.wait_for_world(1, after=known)
            job.add()
            ranks = job.wait_for_world(2, after=known)
            assert all(agent.poll() is None for agent in job.agents), job.output()
    timeline = job.timeline()
    assert [row["step"] for row in timeline] == list(range(1, 51))
    numbers = [number for row in timeline for number in row["samples"]]
    assert len(numbers) == len(set(numbers)) == 50 * 12
