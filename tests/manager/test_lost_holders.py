"""Holders of the state freeze, die and return: no complete state is thrown away while it is the newest one there is."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from allranks.lighthouse.options import Options

from .cluster import LIMIT_S, Cluster, Job, LighthouseProcess
from .faults import Fault
from .test_failures import assert_equal_states
from .test_partitions import status

JOB = Job(until_told=True, pause_s=0.02)
HEALED = " healed: "  # as the log says it


OPTIONS = Options(min_replicas=1, heartbeat_timeout_s=1.0, presume_dead_s=0.5, join_timeout_s=1.0)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(OPTIONS) as running:
        yield running


def committed(cluster: Cluster, name: str) -> list[int]:
    """The steps that the processes of this name have committed, in order."""
    return [int(line) for line in (Path(cluster.folder.name) / name).read_text().split()]


def logged(cluster: Cluster, name: str) -> str:
    """What the processes of this name have logged."""
    return "".join(path.read_text() for path in Path(cluster.folder.name).glob(f"{name}-*.log"))


def wait_until_healed(cluster: Cluster, name: str, times: int) -> None:
    """Until all of another state has arrived so many times."""
    deadline = time.monotonic() + LIMIT_S
    while logged(cluster, name).count(HEALED) < times:
        assert time.monotonic() < deadline, f"{name} has not healed {times} times"
        time.sleep(0.01)


LONG = [pytest.param(place, marks=pytest.mark.everything) for place in ("connecting", "loading state")]


@pytest.mark.parametrize("place", ["sending state", *LONG])
def test_a_state_outlives_the_death_of_the_member_that_was_to_replace_it(
    lighthouse: LighthouseProcess, place: str
) -> None:
    """b returns from a freeze and is to take a's newer state; a dies before b has all of it: b continues from its own."""
    job = replace(JOB, width=200_000, adam=False)
    far, when = 10, 150  # both are there before that, on a slow machine, too
    victim = "b" if place == "loading state" else "a"
    fault = Fault("hang" if victim == "b" else "kill", victim, at_step=5, at=place, for_s=3.0)
    fault = replace(fault, at_step=when) if victim == "a" else fault
    faults = (Fault("stop", "b", at_step=far), fault)
    with Cluster(lighthouse, replace(job, faults=faults, arm_at=2)) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired stop", "b")
        held, healed = cluster.progress("b"), logged(cluster, "b").count(HEALED)
        when = max(when, held)
        cluster.wait_for_progress("a", when + 5)
        os.kill(cluster.pid("b"), signal.SIGCONT)
        if victim == "a":
            cluster.killed("a")
        else:
            cluster.wait_for("fired hang", "b")  # its training thread is about to load what arrives meanwhile
            wait_until_healed(cluster, "b", healed + 1)
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


def test_a_fresh_replica_waits_for_a_frozen_holder() -> None:
    """Nobody else has a state: the fresh one takes the holder's when it runs again, and does not start over."""
    options = replace(OPTIONS, presume_dead_s=60.0)
    with LighthouseProcess(options) as lighthouse, Cluster(lighthouse, JOB) as cluster:
        cluster.start("a")
        cluster.wait_for_progress("a", 10)
        os.kill(cluster.pid("a"), signal.SIGSTOP)
        cluster.start("b")
        deadline = time.monotonic() + LIMIT_S
        while "waiting for a" not in status(lighthouse)["waiting"]:
            assert time.monotonic() < deadline, status(lighthouse)
            time.sleep(0.02)
        held = cluster.progress("a")
        os.kill(cluster.pid("a"), signal.SIGCONT)
        cluster.wait_for_progress("b", held + 3)
        cluster.tell_to_stop()
        assert_equal_states(cluster.results())
        assert committed(cluster, "b")[0] >= held


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


@dataclass
class Sequence:
    """Random freezes, deaths and returns of three replicas, and what must never get lost."""

    cluster: Cluster
    random: random.Random
    # name -> lines of its progress before its process started
    began: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    events: list[str] = field(default_factory=list)

    def start(self, name: str) -> None:
        path = Path(self.cluster.folder.name) / name
        self.began[name] = len(path.read_text().split()) if path.exists() else 0
        self.cluster.start(name)

    def steps(self, name: str) -> list[int]:
        """The steps that the running process has committed."""
        path = Path(self.cluster.folder.name) / name
        return committed(self.cluster, name)[self.began[name] :] if path.exists() else []

    def floor(self) -> int:
        """The most steps of a complete state in a process that is there, frozen or not."""
        return max([0, *(self.steps(name)[-1] for name in self.cluster.replicas if self.steps(name))])

    def act(self) -> None:
        name = self.random.choice("abc")
        if name not in self.cluster.replicas:
            kind = "start"
            self.start(name)
        elif name in self.frozen:
            kind = self.random.choice(["thaw", "thaw", "kill"])
            self.frozen.discard(name)
            os.kill(self.cluster.pid(name), signal.SIGCONT if kind == "thaw" else signal.SIGKILL)
        else:
            kind = self.random.choice(["freeze", "kill"])
            os.kill(self.cluster.pid(name), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
            self.frozen |= {name} if kind == "freeze" else set()
        if kind == "kill":
            self.cluster.end(name)
        self.events.append(f"{kind} {name}")
        self.wait_for_step()

    def wait_for_step(self) -> None:
        """Until the processes that can run have committed a few steps more, or fewer at random: the next event comes in between."""
        running = [name for name in self.cluster.replicas if name not in self.frozen]
        if running:
            before = {
                name: len(committed(self.cluster, name)) if self.steps(name) else self.began[name]
                for name in running
            }
            wanted, deadline = self.random.choice([0, 1, 5, 20]), time.monotonic() + 60
            while all(len(self.steps(n)) + self.began[n] < before[n] + wanted for n in running):
                assert time.monotonic() < deadline, f"no progress after {self.events}"
                time.sleep(0.01)


def play(seed: int) -> dict[str, object]:
    """One sequence: while one process holds a complete state, frozen or not, the training never goes back behind it."""
    with LighthouseProcess(OPTIONS) as lighthouse, Cluster(lighthouse, JOB) as cluster:
        sequence = Sequence(cluster, random.Random(seed))
        for name in "abc":
            sequence.start(name)
        for name in "abc":
            cluster.wait_for_progress(name, 3)
        for _ in range(8):
            sequence.act()
        for name in list(sequence.frozen):
            os.kill(cluster.pid(name), signal.SIGCONT)
        if not cluster.replicas:
            sequence.start("a")
        floor = sequence.floor()
        deadline = time.monotonic() + LIMIT_S
        while any(max(sequence.steps(name), default=0) < floor + 3 for name in cluster.replicas):
            assert time.monotonic() < deadline, f"not all come to step {floor + 3} after {sequence.events}"
            time.sleep(0.01)
        told = {name: sequence.steps(name) for name in cluster.replicas}
        cluster.tell_to_stop()
        results = cluster.results()
    assert_equal_states(results)
    for name, steps in told.items():
        assert steps == sorted(set(steps)), f"{name} went back: {steps} after {sequence.events}"
    return {"events": sequence.events, "step": floor}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_no_state_is_lost_in_a_random_sequence_of_freezes_deaths_and_returns(seed: int) -> None:
    play(seed)
