"""Healing: striped, resumed, checked, closed to unknown clients; and faults at both ends of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from allranks.drill.ranks import signal as mark
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.heal import state as live_state
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer

from .cluster import Cluster, Job, LighthouseProcess, batch, build, fingerprint
from .faults import Fault
from .test_failures import assert_equal_states


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


@pytest.mark.parametrize("asynchronous", [True, False])
def test_replicas_with_other_weights_become_equal(lighthouse: LighthouseProcess, asynchronous: bool) -> None:
    """A late replica takes parameters and optimizer state of the running ones."""
    job = Job(script=(2, 3), own_weights=True, asynchronous=asynchronous)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("act 0", "a", "b")
        cluster.start("c")
        results = cluster.results()
    assert_equal_states(results)
    assert results["a"].failed_steps == results["b"].failed_steps == 0


@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_source_or_receiver_killed_while_healing_leaves_equal_replicas(
    lighthouse: LighthouseProcess, victim: str
) -> None:
    """Sender a or receiver c dies with the state on its way: the rest continues, equal in every bit."""
    faults = (Fault("kill", "c", at="receiving state"),)
    # the other source is held up: otherwise it might send everything before a sends anything
    if victim == "a":
        faults = (Fault("kill", "a", at="sending state"), Fault("hang", "b", at="sending state", for_s=10.0))
    job = Job(own_weights=True, width=200_000, adam=False, until_told=True)
    armed = replace(job, faults=faults, arm_at=2 if victim == "a" else 0)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", job=armed)
        cluster.wait_for("act 0", "a", "b")
        cluster.start("c", job=armed)
        cluster.killed(victim)
        left = [name for name in "abc" if name != victim]
        cluster.wait_for_progress("b", cluster.progress("b") + 10)
        for name in left:
            cluster.wait_for_progress(name, cluster.progress("b") + 2)
        cluster.tell_to_stop()
        results = cluster.results()
    assert sorted(results) == left
    assert_equal_states(results)


@pytest.mark.parametrize("place", ["regrouping", "connecting", "loading state"])
def test_a_joiner_killed_while_it_comes_in_does_not_stop_the_others(
    lighthouse: LighthouseProcess, place: str
) -> None:
    """Dying during the reconfiguration: the members find each other again."""
    fault = Fault("kill", "c", at=place)
    job = Job(own_weights=True, until_told=True)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("act 0", "a", "b")
        cluster.start("c", job=replace(job, faults=(fault,)))
        cluster.killed("c")
        cluster.wait_for_progress("a", cluster.progress("a") + 10)
        cluster.tell_to_stop()
        results = cluster.results()
    assert_equal_states(results)


@pytest.mark.parametrize("place", ["regrouping", "connecting"])
def test_a_second_death_during_the_reconfiguration_after_the_first(
    lighthouse: LighthouseProcess, place: str
) -> None:
    """b dies in a step, c while the survivors regroup: a continues alone."""
    faults = (Fault("kill", "b", at_step=3, at="inside allreduce"), Fault("kill", "c", at_step=3, at=place))
    job = Job(script=(3, 1), faults=faults, arm_at=3)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.killed("b", "c")
        results = cluster.results()
    assert results["a"].step > 3


FROZEN_AT = 5  # steps


def train_and_freeze(rank: int, world: int, address: str, name: str, job: Job, folder: str) -> bool:
    """Whether the state stays that of its step for as long as the script looks at it."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model, inner = build(job)
    live_state.has_room = lambda needs: False  # the fetched state goes into our own memory
    manager = Manager(state=[model, inner], lighthouse_addr=address, replica_id=name, rank=0, world_size=1)
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    same = True
    while not Path(folder, "stop").exists() or manager.current_step() <= FROZEN_AT:
        optimizer.zero_grad()
        ddp(batch(manager.current_step(), job.width)).square().mean().backward()
        if optimizer.step() and manager.current_step() == FROZEN_AT and name == "b":
            saved = fingerprint(model, inner)
            mark("frozen")
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3.0)  # of saving
            same = saved == fingerprint(model, inner)
        Path(folder, name).write_text(f"{manager.current_step()}")
        time.sleep(0.02)
    manager.shutdown()
    return same


def test_who_was_frozen_while_it_saved_saves_no_bytes_of_the_others_state() -> None:
    """Where a second state does not fit into memory, healing replaces the bytes when the script has opened its next step."""
    with (
        LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=1.0)) as lighthouse,
        Cluster(lighthouse, Job(width=40_000), function=train_and_freeze) as cluster,
    ):
        cluster.start("a", "b")
        cluster.wait_for("frozen", "b")
        cluster.wait_for_progress("a", FROZEN_AT + 10)
        os.kill(cluster.pid("b"), signal.SIGCONT)
        cluster.wait_for_progress("b", FROZEN_AT + 5)
        cluster.tell_to_stop()
        outcomes = {name: cluster.end(name) for name in "ab"}
    assert [outcome.value for outcome in outcomes.values()] == [True, True], outcomes
