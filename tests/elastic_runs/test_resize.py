"""Nodes leave and come back: the job changes size, the science does not. Three agents on one machine, real etcd, default settings."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.ports import held_port

from allranks.launch import etcd_server

from .conftest import LAST
from .jobs import Job, assert_same_run

pytestmark = [
    pytest.mark.usefixtures("forks"),
    pytest.mark.timeout(1500),  # for hanging only: each wait has a limit of its own
]


@dataclass(frozen=True)
class GroupSpec:
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
            return job.agent_at(self.endpoint)
        return job.agent_of(ranks, 0)


@pytest.fixture(params=["etcd-v3", pytest.param("c10d", marks=pytest.mark.soak)])
def meeting(request: pytest.FixtureRequest) -> GroupSpec:
    if request.param == "c10d":
        return GroupSpec("c10d", f"127.0.0.1:{held_port()}")
    return GroupSpec("etcd-v3", request.getfixturevalue("etcd"))


def _train_without_etcd(folder: Path, job: Job) -> None:
    """etcd is killed, the job trains on, etcd comes back."""
    server = etcd_server.read(folder / "etcd")
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    job.gate(LAST - 15)
    job.wait("a word of every agent", lambda: job.output().count("does not answer") >= len(job.agents))
    job.wait_for_step(LAST - 15)
    etcd_server.start(folder / "etcd", port=int(server.client.rpartition(":")[2]))


def test_three_nodes_two_nodes_three_nodes(
    tmp_path: Path, meeting: GroupSpec, undisturbed: list[float]
) -> None:
    """The node that hosts the store is killed, another one comes: same batches, same samples, same losses."""
    with Job(tmp_path / "job", LAST, *meeting.flags("2:3"), "--no-spares") as job:  # two cores, three nodes
        for _ in range(3):
            job.add()
        three = job.wait_for_world(3)
        job.gate(LAST - 20)
        job.wait_for_step(10, world=3)
        known = len(job.events())
        job.kill_node(meeting.host(job, three), three)
        two = job.wait_for_world(2, after=known)
        assert {(row["restored"], row["tier"]) for row in two} == {("checkpoint", "PEER")}
        changes = {(row["old_world_size"], row["new_world_size"]) for row in job.events()[known:]}
        assert (3, 2) in changes
        job.wait_for_step(LAST - 20, world=2)
        if meeting.backend == "etcd-v3":
            _train_without_etcd(tmp_path, job)
        known = len(job.events())
        job.add()
        again = job.wait_for_world(3, after=known)
        assert {(row["restored"], row["tier"]) for row in again} == {("checkpoint", "PEER")}
        job.gate(LAST)
        assert job.wait_for_end() == [0, 0, 0], job.output()
    assert {row["global_batch_size"] for row in job.events()} == {12}
    assert_same_run(job, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_restart_and_scale_up_succeed_twenty_of_twenty_times(
    tmp_path: Path, meeting: GroupSpec, part: int
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
            victim = meeting.host(job, ranks) if round_ % 2 else job.agent_of(ranks, (part + round_) % 2)
            job.kill_node(victim, ranks)
            job.wait_for_world(1, after=known)
            job.add()
            ranks = job.wait_for_world(2, after=known)
            assert all(agent.poll() is None for agent in job.agents), job.output()
    timeline = job.timeline()
    assert [row["step"] for row in timeline] == list(range(1, 51))
    numbers = [number for row in timeline for number in row["samples"]]
    assert len(numbers) == len(set(numbers)) == 50 * 12
