"""A rank dies: all are started again, from the snapshots that the agent has kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.ports import held_port

from proc import gone

from .conftest import LAST
from .jobs import Job, assert_same_run
from .train import EVERY

pytestmark = pytest.mark.usefixtures("forks")


def test_a_killed_rank_comes_back_from_the_agents_memory(tmp_path: Path, undisturbed: list[float]) -> None:
    """kill -9 of one of two ranks: both go on from the newest snapshot of tier PEER; no disk tier exists."""
    with Job(tmp_path / "job", LAST, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3") as job:
        job.add()
        first = job.wait_for_world(2)
        assert {row["restored"] for row in first} == {"fresh"}
        job.gate(LAST)
        job.wait_for_step(20)
        victim = next(row["pid"] for row in first if row["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        second = job.wait_for_world(2, after=2)
        assert gone(victim)
        assert job.wait_for_end() == [0], job.output()
        assert len(job.events()) == 4, "one restart was enough"
    assert {(row["restored"], row["tier"]) for row in second} == {("checkpoint", "PEER")}
    resumed = {row["step"] for row in second}.pop()
    before = max(row["step"] for row in job.steps() if row["at"] < second[0]["timestamp"])
    assert resumed % EVERY == 1 and before - EVERY < resumed <= before + EVERY
    assert not list(job.folder.glob("**/*manifest*"))
    assert_same_run(job, undisturbed)


@pytest.mark.everything  # test_resize kills the node that hosts a store, too
def test_the_loss_of_the_rendezvous_itself_is_survived(tmp_path: Path, undisturbed: list[float]) -> None:
    """The agent that hosts the c10d store is killed: the other one becomes the host and continues from its memory."""
    endpoint = f"127.0.0.1:{held_port()}"
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=lost"]
    with Job(tmp_path / "job", LAST, *flags, "--local-addr=127.0.0.1", "--max-restarts=3") as job:
        job.add()
        job.add()
        two = job.wait_for_world(2)
        job.gate(LAST - 20)
        job.wait_for_step(LAST - 30, world=2)
        known = len(job.events())
        job.kill_node(job.agent_at(endpoint), two)
        one = job.wait_for_world(1, after=known)
        assert job.agent_at(endpoint) is job.agents[0]
        job.gate(LAST)
        assert job.wait_for_end() == [0], job.output()
        assert "is lost" in job.output()
    assert [(row["restored"], row["tier"]) for row in one] == [("checkpoint", "PEER")]
    assert_same_run(job, undisturbed)
