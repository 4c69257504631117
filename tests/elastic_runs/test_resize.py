"""Nodes leave and come back: the job changes size, the science does not. Three agents on one machine, real etcd."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import LAST
from .jobs import Job, assert_same_run, gone, parent_of

pytestmark = pytest.mark.timeout(600)  # for hanging only

PHASES = {"stop", "decide", "rescale", "restore", "data", "go"}


def _flags(etcd: str, nodes: str) -> list[str]:
    patient = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=8"  # machines are shared
    return [
        "--nnodes", nodes, "--rdzv-conf", patient, "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "etcd-v3",
        "--rdzv-endpoint", etcd, "--rdzv-id", "resize", "--local-addr", "127.0.0.1",
    ]  # fmt: skip


def _kill_node(job: Job, ranks: list[dict[str, Any]], rank: int) -> None:
    """kill -9 of the agent that runs a rank; the rank must go with it."""
    pid = next(row["pid"] for row in ranks if row["rank"] == rank)
    agent = next(agent for agent in job.agents if agent.pid == parent_of(pid))
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait(60)
    job.agents.remove(agent)
    job.wait("the end of the killed node's rank", lambda: gone(pid))


def test_three_nodes_two_nodes_three_nodes(tmp_path: Path, etcd: str, undisturbed: list[float]) -> None:
    """The node that hosts the store is killed, another one comes: same batches, same samples, same losses."""
    with Job(tmp_path / "job", LAST, *_flags(etcd, "2:3")) as job:
        for _ in range(3):
            job.add()
        three = job.wait_for_world(3)
        job.gate(LAST - 20)
        job.wait_for_step(10, world=3)
        known = len(job.events())
        _kill_node(job, three, rank=0)  # the store of the process group lives with rank 0
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
@pytest.mark.timeout(3600)
def test_restart_and_scale_up_succeed_twenty_of_twenty_times(tmp_path: Path, etcd: str) -> None:
    """One job of two nodes: twenty times a rank is killed, twenty times a node is killed and another one comes."""
    with Job(tmp_path / "job", 10_000, *_flags(etcd, "1:2")) as job:
        job.add()
        job.add()
        ranks = job.wait_for_world(2)
        for round_ in range(20):
            job.gate(10 * round_ + 5)
            job.wait_for_step(10 * round_ + 5, world=2)
            known = len(job.events())
            os.kill(ranks[round_ % 2]["pid"], signal.SIGKILL)
            ranks = job.wait_for_world(2, after=known)
            job.gate(10 * round_ + 10)
            job.wait_for_step(10 * round_ + 10, world=2)
            known = len(job.events())
            _kill_node(job, ranks, rank=round_ % 2)
            job.wait_for_world(1, after=known)
            job.add()
            ranks = job.wait_for_world(2, after=known)
            assert all(agent.poll() is None for agent in job.agents), job.output()
    timeline = job.timeline()
    assert [row["step"] for row in timeline] == list(range(1, 201))
    numbers = [number for row in timeline for number in row["samples"]]
    assert len(numbers) == len(set(numbers)) == 200 * 12
