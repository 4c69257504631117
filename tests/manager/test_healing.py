"""Healing: striped, resumed, checked, closed to unknown clients; and faults at both ends of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from allranks.lighthouse.options import Options

from .cluster import Cluster, Job, LighthouseProcess
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
        cluster.wait_for_progress("b", cluster.progress("b") + 10)
        cluster.tell_to_stop()
        results = cluster.results()
    assert sorted(results) == [name for name in "abc" if name != victim]
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
