"""Replicas that leave, freeze, hang, are cut off or come back; and a lighthouse that goes away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options
from allranks.manager.vote_mesh import Tally, Vote, VoteMesh

from .cluster import Cluster, Job, LighthouseProcess
from .faults import Fault
from .test_failures import assert_equal_states, assert_like_undisturbed


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=1.0)) as running:
        yield running


@pytest.mark.parametrize("place", ["step start", "before apply"])
def test_a_graceful_leave_costs_no_step(lighthouse: LighthouseProcess, place: str) -> None:
    """The peer says good-bye: no step fails, the survivor computes what an undisturbed run computes."""
    fault = Fault("leave", "b", at_step=4, at=place)
    job = Job(script=(2, 1), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired leave", "b")
        assert "shut down" in cluster.end("b").error
        results = cluster.results()
    assert results["a"].failed_steps == 0
    assert_like_undisturbed(job, results["a"])


@pytest.mark.parametrize("place", ["inside allreduce", "inside vote", "step start"])
def test_a_frozen_replica_is_left_behind(lighthouse: LighthouseProcess, place: str) -> None:
    """SIGSTOP: sockets stay open, only heartbeats tell; the other continues after the heartbeat timeout."""
    fault = Fault("stop", "b", at_step=4, at=place)
    job = Job(script=(2, 1), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired stop", "b")
        outcome = cluster.end("a")
        assert outcome.exit_code == 0, outcome.error
    assert_like_undisturbed(job, outcome.value)


def test_a_replica_that_thaws_heals_and_trains_on(lighthouse: LighthouseProcess) -> None:
    """SIGCONT after it was left behind: it finds itself outdated, heals, and ends with the same bits."""
    fault = Fault("stop", "b", at_step=4, at="inside allreduce")
    job = Job(script=(2, 1, 2), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired stop", "b")
        cluster.wait_for("act 1", "a")
        os.kill(cluster.pid("b"), signal.SIGCONT)
        results = cluster.results()
    assert_equal_states(results)


def test_an_evicted_hanging_replica_does_not_stop_the_others(lighthouse: LighthouseProcess) -> None:
    """Its heart beats, its main thread hangs: once evicted, the other continues."""
    fault = Fault("hang", "b", at_step=4, at="before allreduce")
    job = Job(script=(2, 1), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired hang", "b")
        watcher = ClientOptions(addresses=(lighthouse.address,), role="observer")
        with Client(watcher) as client:
            client.evict("b", "no progress for 30 s")
        outcome = cluster.end("a")
        assert outcome.exit_code == 0, outcome.error
    assert_like_undisturbed(job, outcome.value)


def test_a_replica_that_hangs_ends_no_other(lighthouse: LighthouseProcess) -> None:
    """It lives, changes its state and asks for nothing. Who would give up before the lighthouse gives up that one goes on a little earlier."""
    fault = Fault("hang", "b", at_step=4, at="before apply")
    job = Job(script=(2, 1), faults=(fault,), arm_at=2, timeout_s=6.0)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        outcome = cluster.end("a")
        assert outcome.exit_code == 0, outcome.error
    assert_like_undisturbed(job, outcome.value)


def test_a_replica_evicted_while_it_hung_fails_its_step_and_says_so(lighthouse: LighthouseProcess) -> None:
    """When its main thread comes back it must not train on: the lighthouse's reason is its error."""
    fault = Fault("hang", "b", at_step=4, at="before allreduce", for_s=1.5)
    job = Job(script=(2, 1), faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for("fired hang", "b")
        with Client(ClientOptions(addresses=(lighthouse.address,), role="observer")) as client:
            client.evict("b", "no progress for 30 s")
        assert "no progress for 30 s" in cluster.end("b").error
        results = cluster.results()
    assert results["a"].failed_steps == 0


def test_members_cut_off_from_each_other_meet_again(lighthouse: LighthouseProcess) -> None:
    """The connections of a group break while all processes live: a new group, nothing lost."""
    fault = Fault("cut", "b", at_step=4, at="before allreduce")
    job = Job(script=(2,), stay=12, faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        results = cluster.results()
    assert results["b"].fired == 1
    assert_equal_states(results)


def test_one_voice_against_the_step_and_nobody_commits_it(lighthouse: LighthouseProcess) -> None:
    """report_error in one replica: the step fails everywhere, is tried again, and states stay equal."""
    fault = Fault("error", "b", at_step=4, at="before vote")
    job = Job(script=(2,), stay=12, faults=(fault,), arm_at=2)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        results = cluster.results()
    assert results["b"].fired == 1
    assert [results[name].failed_steps for name in ("a", "b")] == [1, 1]
    assert_equal_states(results)


def test_a_step_that_one_votes_against_is_not_committed_when_another_dies_in_the_vote(
    lighthouse: LighthouseProcess,
) -> None:
    """The survivors do not know the result: the one that has voted against it is not in doubt."""
    faults = (
        Fault("error", "b", at_step=4, at="before vote"),
        Fault("slow", "c", at_step=4, at="inside allreduce", for_s=1.0),  # the others vote before it dies
        Fault("kill", "c", at_step=4, at="before vote"),
    )
    job = Job(script=(3, 2), faults=faults, arm_at=3)
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.killed("c")
        results = cluster.results()
    assert results["b"].fired == 1
    assert all(results[name].failed_steps for name in ("a", "b"))
    assert_equal_states(results)


def test_who_hears_a_vote_against_the_step_after_it_asked_for_a_quorum_does_what_the_quorum_decides(
    lighthouse: LighthouseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`b` votes against the step and dies when only `a` has heard it. `c` commits the step: so must `a`."""
    cast = VoteMesh.vote

    def cast_slowly(mesh: VoteMesh, vote: Vote) -> Tally:
        tally = cast(mesh, vote)
        if not tally.passed:
            time.sleep(2.0)  # the quorum without `b` is asked for and made
        return tally

    monkeypatch.setattr(VoteMesh, "vote", cast_slowly)
    faults = (Fault("error", "b", at_step=4, at="before vote"), Fault("kill", "b", at_step=4, at="half vote"))
    with Cluster(lighthouse, Job(script=(3, 2), faults=faults, arm_at=3)) as cluster:
        cluster.start("a", "b", "c")
        cluster.killed("b")
        results = cluster.results()
    assert_equal_states(results)


def test_below_min_replicas_training_waits_and_goes_on_when_enough_are_back() -> None:
    """Two must train together: the survivor waits, then both go on from the last committed step."""
    with LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=1.0)) as lighthouse:
        fault = Fault("kill", "b", at_step=4, at="inside allreduce")
        job = Job(script=(2,), stay=12, faults=(fault,), arm_at=2, min_replicas=2)
        with Cluster(lighthouse, job) as cluster:
            cluster.start("a", "b")
            cluster.killed("b")
            cluster.start("b", job=replace(job, faults=()))
            results = cluster.results()
    assert_equal_states(results)
    assert_like_undisturbed(job, results["a"])


def test_training_goes_on_while_the_lighthouse_is_gone() -> None:
    """No step needs it; back under the same address, it lets a new replica in."""
    lighthouse = LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=1.0)).start()
    job = Job(script=(2, 3), pause_s=0.005)
    try:
        with Cluster(lighthouse, job) as cluster:
            cluster.start("a", "b")
            cluster.wait_for("act 0", "a", "b")
            lighthouse.kill()
            before = {name: cluster.progress(name) for name in ("a", "b")}
            for name, step in before.items():
                cluster.wait_for_progress(name, step + 20)
            lighthouse.start()
            cluster.start("c")
            results = cluster.results()
    finally:
        lighthouse.kill()
    assert_equal_states(results)
    assert results["a"].failed_steps == results["b"].failed_steps == 0


def test_a_replica_that_dies_while_the_lighthouse_is_away_costs_nothing_once_it_is_back() -> None:
    """The survivor waits for the lighthouse, not forever and not in vain."""
    lighthouse = LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=1.0)).start()
    job = Job(script=(2, 1), pause_s=0.005)
    try:
        with Cluster(lighthouse, job) as cluster:
            cluster.start("a", "b")
            cluster.wait_for("act 0", "a", "b")
            lighthouse.kill()
            os.kill(cluster.pid("b"), signal.SIGKILL)
            assert cluster.end("b").exit_code == -9
            lighthouse.start()
            results = cluster.results()
    finally:
        lighthouse.kill()
    assert_like_undisturbed(job, results["a"])


def test_without_the_push_the_socket_error_still_ends_the_step(lighthouse: LighthouseProcess) -> None:
    """ALLRANKS_PROACTIVE=0: a closed socket is noticed by the collective itself."""
    fault = Fault("kill", "b", at_step=4, at="before allreduce")
    job = Job(script=(2, 1), faults=(fault,), arm_at=2, options={"proactive_recovery": False})
    with Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.killed("b")
        results = cluster.results()
    assert_like_undisturbed(job, results["a"])
