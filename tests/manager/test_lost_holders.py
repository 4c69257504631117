"""Holders of the state freeze, die and return: no complete state is thrown away while it is the newest one there is."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.drill.faults import Fault
from allranks.lighthouse.options import Options

from .cluster import Cluster, Job, LighthouseProcess
from .test_failures import assert_equal_states

JOB = Job(until_told=True, pause_s=0.02)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    options = Options(min_replicas=1, heartbeat_timeout_s=1.0, presume_dead_s=0.5, join_timeout_s=1.0)
    with LighthouseProcess(options) as running:
        yield running


def committed(cluster: Cluster, name: str) -> list[int]:
    """The steps that the processes of this name have committed, in order."""
    return [int(line) for line in (Path(cluster.folder.name) / name).read_text().split()]


def logged(cluster: Cluster, name: str) -> str:
    """What the processes of this name have logged."""
    return "".join(path.read_text() for path in Path(cluster.folder.name).glob(f"{name}-*.log"))


@pytest.mark.parametrize("place", ["connecting", "sending state", "loading state"])
def test_a_state_outlives_the_death_of_the_member_that_was_to_replace_it(
    lighthouse: LighthouseProcess, place: str
) -> None:
    """b returns from a freeze and is to take a's newer state; a dies before b has all of it: b continues from its own."""
    job = replace(JOB, width=200_000, adam=False)
    far, when = 10, 40
    victim = "b" if place == "loading state" else "a"
    fault = Fault("hang" if victim == "b" else "kill", victim, at_step=5, at=place, for_s=3.0)
    fault = replace(fault, at_step=when) if victim == "a" else fault
    with Cluster(lighthouse, replace(job, faults=(fault,))) as cluster:
        cluster.start("a", "b")
        cluster.wait_for_progress("b", far)
        os.kill(cluster.pid("b"), signal.SIGSTOP)
        assert cluster.progress("b") < when
        cluster.wait_for_progress("a", when + 5)
        held = cluster.progress("b")
        os.kill(cluster.pid("b"), signal.SIGCONT)
        if victim == "a":
            cluster.killed("a")
        else:
            cluster.wait_for("fired hang", "b")
            os.kill(cluster.pid("a"), signal.SIGKILL)
            cluster.end("a")
        cluster.wait_for_progress("b", held + 5)
        cluster.tell_to_stop()
        cluster.results()
        steps = committed(cluster, "b")
    after = steps[steps.index(held) + 1]
    assert after in (held + 1, held + 2) if victim == "a" else after > when  # what had arrived counts


def test_the_newest_state_wins_when_its_holder_returns(lighthouse: LighthouseProcess) -> None:
    """The only holder is frozen for longer than silence is tolerated, and a fresh replica starts at 0: not for long."""
    with Cluster(lighthouse, JOB) as cluster:
        cluster.start("a")
        cluster.wait_for_progress("a", 60)
        os.kill(cluster.pid("a"), signal.SIGSTOP)
        cluster.start("b", job=replace(JOB, pause_s=0.2))
        cluster.wait_for_progress("b", 3)
        held = cluster.progress("a")
        os.kill(cluster.pid("a"), signal.SIGCONT)
        cluster.wait_for_progress("b", held + 3)
        cluster.tell_to_stop()
        results = cluster.results()
        said = logged(cluster, "b")
    assert_equal_states(results)
    found = re.search(r"b drops its (\d+) steps after step 0 \(it holds step \1\): a holds step (\d+)", said)
    assert found is not None and int(found[1]) >= 3 and int(found[2]) >= held


def test_a_holder_that_returns_too_late_names_both_states(lighthouse: LighthouseProcess) -> None:
    """The others started over and have committed more than it has by now: it takes their state, and says what is dropped."""
    with Cluster(lighthouse, JOB) as cluster:
        cluster.start("a")
        cluster.wait_for_progress("a", 10)
        os.kill(cluster.pid("a"), signal.SIGSTOP)
        held = cluster.progress("a")
        cluster.start("b")
        cluster.wait_for_progress("b", held + 10)
        os.kill(cluster.pid("a"), signal.SIGCONT)
        cluster.wait_for_progress("a", held + 12)
        cluster.tell_to_stop()
        results = cluster.results()
        said = logged(cluster, "a")
    assert_equal_states(results)
    assert re.search(r"a drops its \d+ steps after step 0 \(it holds step \d+\): b holds step \d+", said)
