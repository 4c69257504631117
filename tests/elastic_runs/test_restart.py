"""A rank dies: all are started again, from the snapshots that the agent has kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .conftest import LAST
from .jobs import Job, assert_same_run, gone
from .train import EVERY

pytestmark = pytest.mark.timeout(400)  # for hanging only


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
