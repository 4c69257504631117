"""The loop between suspicion and action in replica mode: hangs that others leave behind, ends, returns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allranks.incidents.folder import read_incidents
from allranks.launch.node_agent import NodeAgent
from allranks.model.diagnosis import Finding
from allranks.model.stacks import (
    RankState,
    StacksReport,
)
from allranks.supervise.replicas import Event, ReplicaOptions, Request, Supervisor
from allranks.watch.exits import Death
from boxes import write_box

from .watches import VERDICT, Hand, answer_with, look, trained


@pytest.mark.parametrize("named", [0, 1])
def test_a_replica_that_has_not_moved_since_before_a_regroup_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    """Ranks 0 and 2 gave step 30 up and try it again in a new group, in which the boxes look like the start of a job;
    rank 1 sleeps. Nobody who has made 30 steps "has not begun"."""
    ranks = {
        r: RankState(r, "sleep" if r == 1 else "collective_wait", "data.py:3 in load", "") for r in range(3)
    }
    report = StacksReport(hung=True, culprits=(1,), sentence="", ranks=ranks)
    answer_with(monkeypatch, Finding("not_started", (named,), "has not begun", confidence=0.9), report)
    hand = Hand()
    watch = trained(tmp_path, hand)
    for rank in (0, 2):
        write_box(tmp_path / "boxes", rank, 30, calls=70, step_ns=2)
    for tenths in range(31, 700, 4):
        if not hand.done:
            look(watch, tenths / 10)
    assert [(action.kind, action.replica, action.ranks) for action in hand.done] == [("evict", 1, (1,))]
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["verdict"]["cause"], story["ranks"]) == ("sleep", [1])
    assert story["verdict"]["sentence"].startswith("rank 1 has not moved for ")


def test_a_stopped_replica_that_the_others_left_behind_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is frozen; ranks 0 and 2 train on; rank 1's replica is evicted once, the others are not touched."""
    state = RankState(1, "stopped", "data.py:3 in load", "state T")
    report = StacksReport(hung=None, culprits=(1,), sentence="", ranks={1: state})
    answer_with(monkeypatch, stacks=report)
    hand = Hand()
    watch = trained(tmp_path, hand)
    for moment in range(40, 600):
        for rank in (0, 2):
            write_box(tmp_path / "boxes", rank, moment)
        look(watch, moment / 10)
        if watch.hangs.behind is not None:
            watch.hangs.behind.next_s = 0.0
    assert [(action.kind, action.replica, action.ranks) for action in hand.done] == [("evict", 1, (1,))]
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["verdict"]["cause"], story["step"]) == ("hang", "stopped", 30)
    assert "recovered" in [moment["name"] for moment in story["timeline"]]


@pytest.mark.parametrize("young", [False, True])
def test_a_standstill_that_ends_because_the_others_go_on_without_one_is_the_same_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, young: bool
) -> None:
    """Nobody moves, one look is taken; then ranks 0 and 2 train on and rank 1 does not: noticed once, and early."""
    state = RankState(1, "stopped", "data.py:3 in load", "state T")
    answer_with(monkeypatch, stacks=StacksReport(hung=None, culprits=(1,), sentence="", ranks={1: state}))
    watch = trained(tmp_path, Hand())
    if young:  # in its first step
        write_box(tmp_path / "boxes", 1, 30, start_ns=2)
        look(watch, 3.1)
    look(watch, 50.0)
    assert watch.hangs.standstill is not None
    for moment in range(510, 700):
        for rank in (0, 2):
            write_box(tmp_path / "boxes", rank, moment)
        look(watch, moment / 10)
        if watch.hangs.behind is not None:
            watch.hangs.behind.next_s = 0.0
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["ranks"], story["action"]["kind"]) == ("hang", [1], "evict")
    assert [moment["name"] for moment in story["timeline"]].count("noticed") == 1


def test_a_suspicion_that_one_look_did_not_settle_is_no_hang_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow ending is not an incident of its own."""
    answer_with(monkeypatch, VERDICT)
    watch = trained(tmp_path, Hand())
    look(watch, 8.1)
    watch.close()
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["kind"] == "stall"


def test_when_all_ranks_die_at_once_their_next_lives_end_the_incident(tmp_path: Path) -> None:
    """There are no survivors to watch: the job has recovered when every rank completes calls again."""
    watch = trained(tmp_path, Hand())
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, 30, pid=2**22 + rank)  # no such process
    opened = watch.deaths.note_death(Death(1, 2**22 + 1, 1.0, "died of SIGKILL"))
    assert opened is not None
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, -1, calls=0)
    look(watch, 5.0)
    assert opened.current.closed is None
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, 0, calls=2)
    look(watch, 6.0)
    assert json.loads((opened.path / "incident.json").read_text())["closed"] is not None


class Ranks(Supervisor):
    """A supervisor that starts nothing: replicas 1 and 2 are in their second life."""

    def __init__(self) -> None:
        super().__init__(ReplicaOptions((), 3))
        self.asked: list[Request] = []

    def restarted(self) -> tuple[int, ...]:
        return (1, 2)

    def pids(self) -> dict[int, int]:
        return {1: os.getpid(), 2: os.getpid()}

    def request(self, request: Request) -> None:
        self.asked.append(request)


def test_when_the_training_is_over_a_replica_on_its_way_back_is_turned_away(tmp_path: Path) -> None:
    """Replica 2 has completed calls and ends by itself; replica 1 would train alone from the first step."""
    watch, ranks = trained(tmp_path, Hand()), Ranks()
    write_box(tmp_path / "boxes", 1, -1, calls=0)
    agent = NodeAgent(watch, None, ranks)
    agent._on_event(Event("finished", 0, 0.0))
    agent.close()
    assert [(request.action, request.replica) for request in ranks.asked] == [("stop", 1)]


def test_a_replica_has_trained_when_its_calls_and_steps_went_on_for_a_while(tmp_path: Path) -> None:
    """Replica 1 trained for a minute, replica 2 died in its first steps, replica 0 has just started."""
    watch = trained(tmp_path, Hand())
    agent = NodeAgent(watch, None, Ranks())
    write_box(tmp_path / "boxes", 0, -1, calls=0, start_ns=10**18)
    write_box(tmp_path / "boxes", 1, 900, start_ns=10**18, step_ns=10**18 + 60 * 10**9)
    write_box(tmp_path / "boxes", 2, 900, calls=4, start_ns=10**18, step_ns=10**18 + 60 * 10**9)
    assert [agent.has_trained(replica) for replica in range(3)] == [False, True, False]
