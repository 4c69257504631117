"""Faults at every place of a step: the fault fires, nobody hangs, states stay equal, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from allranks.drill.ranks import signal as mark
from allranks.lighthouse.options import Options
from allranks.manager.regroup import Regrouper
from allranks.model.cluster import Quorum

from .cluster import Cluster, Job, LighthouseProcess, Result, undisturbed
from .faults import Fault


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


def assert_equal_states(results: dict[str, Result]) -> None:
    """Every bit of parameters and optimizer state, the step and the number of batches are the same everywhere."""
    assert len({(result.step, result.state, result.batches) for result in results.values()}) == 1, results


def assert_like_undisturbed(job: Job, result: Result) -> None:
    """The run with faults computed exactly what one process alone computes."""
    state, losses = undisturbed(job, result.step)
    assert result.losses == {step: losses[step] for step in result.losses}
    assert result.state == state


@pytest.mark.parametrize(
    "place",
    [
        "step start", "before allreduce", "inside allreduce", "before vote", "inside vote", "after vote",
        "before apply",
    ],
)  # fmt: skip
def test_a_replica_killed_at_any_place_of_a_step_costs_nothing(
    lighthouse: LighthouseProcess, place: str
) -> None:
    """kill -9 of one of two: the survivor continues and computes what an undisturbed run computes."""
    fault = Fault("kill", "b", at_step=4, at=place)
    job = Job(script=(2, 1), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.killed("b")
        results = cluster.results()
    assert results["a"].failed_steps <= 1
    assert_like_undisturbed(job, results["a"])


def lose_one_of_three(lighthouse: LighthouseProcess, place: str) -> None:
    """The one in the middle is killed at `place`; the two survivors agree on every bit."""
    fault = Fault("kill", "b", at_step=4, at=place)
    job = Job(script=(3, 2), faults=(fault,), arm_at=3, own_weights=True)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.killed("b")
        results = cluster.results()
    assert_equal_states(results)


@pytest.mark.parametrize(
    "place", ["before allreduce", "inside allreduce", "half vote", "inside vote", "before apply"]
)
def test_three_replicas_lose_one_and_stay_equal(lighthouse: LighthouseProcess, place: str) -> None:
    """The two survivors agree on every bit although only one of them may have seen the last vote."""
    lose_one_of_three(lighthouse, place)


def test_a_killed_replica_comes_back_heals_and_trains_on(lighthouse: LighthouseProcess) -> None:
    """The same name, a new process: it takes the live state and ends with the same bits as the survivor."""
    fault = Fault("kill", "b", at_step=4, at="inside allreduce")
    job = Job(script=(2, 1, 2), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.killed("b")
        cluster.start("b", job=replace(job, faults=()))
        results = cluster.results()
    assert_equal_states(results)
    state, _ = undisturbed(job, results["a"].step)
    assert results["a"].state == state


def test_two_of_four_killed_at_once_leave_two_equal_replicas(lighthouse: LighthouseProcess) -> None:
    """Both die in the same step; the other two go on together."""
    faults = tuple(Fault("kill", name, at_step=3, at="inside allreduce") for name in ("b", "d"))
    job = Job(script=(4, 2), faults=faults, arm_at=4)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.killed("b", "d")
        results = cluster.results()
    assert_equal_states(results)


def test_all_but_one_killed_leave_one_that_trains_on(lighthouse: LighthouseProcess) -> None:
    """The last one continues alone from the last committed step."""
    faults = tuple(Fault("kill", name, at_step=3, at="before vote") for name in ("a", "b"))
    job = Job(script=(3, 1), faults=faults, arm_at=3)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.killed("a", "b")
        results = cluster.results()
    assert results["c"].step >= 4


def test_members_that_wait_for_one_that_gave_the_group_up_ask_again_with_it(
    lighthouse: LighthouseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives and is not going to call: the lighthouse tells those who would wait for the whole limit."""
    connect, given_up = Regrouper._connect, []

    def give_up_once(regrouper: Regrouper, quorum: Quorum, *rest: Any) -> None:
        if regrouper.options.replica_id == "b" and len(quorum.members) == 3 and not given_up:
            given_up.append(quorum.number)
            mark("gave up")
            raise RuntimeError("given up by the test")
        connect(regrouper, quorum, *rest)

    monkeypatch.setattr(Regrouper, "_connect", give_up_once)
    job = Job(script=(3,), own_weights=True, timeout_s=600.0)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.wait_for("gave up", "b")
        results = cluster.results()
    assert_equal_states(results)
