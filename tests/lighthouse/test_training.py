"""The first line of the job's page: what the training does now, who is missing, and in which colour."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from allranks.lighthouse import metrics
from allranks.lighthouse.messages import Beat
from allranks.lighthouse.metrics import render_metrics
from allranks.lighthouse.page import take_sample, take_snapshot
from allranks.lighthouse.status import Status, StatusEvent
from allranks.lighthouse.training import Scene, TrainingView
from allranks.model.job_state import AgentState, JobFacts, OpenIncident, describe

from .without_sockets import Desk, on_loop


class Clock:
    """Seconds that a test turns."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def trained(steps: int = 20, pause_s: float = 0.5) -> tuple[TrainingView, Clock]:
    """A view that has seen steps come regularly."""
    clock = Clock()
    view = TrainingView(clock)
    for step in range(1, steps + 1):
        clock.at += pause_s
        view.note_step("replica-0", step, clock.at)
    return view, clock


ALL = Scene(members=3, alive=("replica-0", "replica-1", "replica-2"))
TWO = Scene(members=2, alive=("replica-0", "replica-1"))


def test_steps_that_come_are_green_with_their_speed() -> None:
    """As in "Training: step 1,650, 6.6 steps/s, 3 of 4 replicas"."""
    view, _ = trained()
    found = view.describe(ALL)
    assert (found.sentence, found.state) == ("Training: step 20, 2.0 steps/s, 3 of 3 replicas", "good")


def test_without_agents_a_stall_of_seconds_is_amber_and_of_a_minute_red() -> None:
    """Whatever the quorum thinks of it; the next step is green again."""
    view, clock = trained()
    clock.at += 33
    found = view.describe(ALL)
    assert (found.sentence, found.state) == ("Stalled: no step for 33 s, at step 20, 3 of 3 replicas", "warn")
    assert (found.stalled_s, found.steps_per_s) == (33.0, None)
    clock.at += 60
    assert view.describe(ALL).state == "bad"
    view.note_step("replica-0", 21, clock.at)
    assert view.describe(ALL).state == "good"


MOVING, LOOKING = AgentState(), AgentState("stalled", "rank 0 waits for rank 1 in all_reduce")
HUNG = AgentState("hung", "Rank 1 never entered all_reduce #9; it is at train.py:7 in load_batch")
WHOLE = Scene(members=0, nodes=2, agents=(MOVING, MOVING))


def test_a_script_without_step_marks_is_judged_by_its_calls() -> None:
    """Any script under `allranks run`: it does not look as if it were still starting, and a hang is seen."""
    clock = Clock()
    view = TrainingView(clock)
    view.note_calls("agent-a", 0, clock.at)
    assert view.describe(WHOLE).sentence == "Starting, 2 nodes"
    for calls in range(100, 2100, 100):
        clock.at += 1.0
        view.note_calls("agent-a", calls, clock.at)
        view.note_calls("agent-b", calls, clock.at)
    found = view.describe(WHOLE)
    running = "Running: 4,000 calls finished, 200 calls/s, 2 nodes"
    assert (found.sentence, found.state) == (running, "good")
    clock.at += 33
    found = view.describe(WHOLE)
    late = "Running: 4,000 calls finished, the last one 33 s ago, 2 nodes"
    assert (found.sentence, found.state) == (late, "good")  # its agents know that this is not a hang
    found = view.describe(replace(WHOLE, agents=(MOVING, LOOKING)))
    assert found.sentence == (
        "Looking into it: no progress for 33 s, 2 nodes; rank 0 waits for rank 1 in all_reduce"
    )
    assert (found.state, found.stalled_s) == ("warn", 33.0)
    found = view.describe(replace(WHOLE, agents=(HUNG, MOVING)))
    assert found.sentence == (
        "Hung for 33 s: rank 1 never entered all_reduce #9; it is at train.py:7 in load_batch"
    )
    assert (found.state, found.word) == ("bad", "hung")


def test_calls_far_apart_are_no_stall() -> None:
    """A minute between two collectives may be usual."""
    clock = Clock()
    view = TrainingView(clock)
    for calls in range(10):
        clock.at += 60.0
        view.note_calls("agent-a", calls, clock.at)
    clock.at += 100
    assert view.describe(replace(WHOLE, agents=())).sentence.startswith(
        "Running: 9 calls finished, 60.0 s per call"
    )


def test_a_hang_in_the_first_steps_is_amber_from_the_suspicion_and_red_from_the_verdict() -> None:
    """What is usual is not known yet, and the agents are: it said "Training, 4.0 steps/s" for 22 s."""
    view, clock = trained(steps=5, pause_s=0.25)
    clock.at += 22
    hang = OpenIncident(
        "hang", "Rank 1 sleeps at train.py:7", decided="would restart the job (--recovery on does it)"
    )
    suspected = view.describe(replace(WHOLE, agents=(LOOKING,)))
    assert suspected.state == "warn" and suspected.sentence.startswith(
        "Looking into it: no progress for 22 s, at step 5, 2 nodes; rank 0 waits"
    )
    assert suspected.steps_per_s is None
    known = view.describe(replace(WHOLE, agents=(HUNG,), incidents=(hang,)))
    assert (known.sentence, known.state) == (
        "Hung for 22 s, at step 5: rank 1 sleeps at train.py:7. Would restart the job (--recovery on does it)",
        "bad",
    )
    done = replace(hang, outcome="rank 1 was ended; the launcher restarts the job")
    found = view.describe(replace(WHOLE, incidents=(done,)))
    assert (found.word, found.state) == ("recovering", "warn") and done.outcome in found.sentence


@on_loop
async def test_a_job_whose_agent_suspects_a_hang_is_not_green() -> None:
    """In the first steps a silence of 20 s is usual, until an agent looks into it: its verdict takes longer."""
    desk = Desk()
    agent, _ = desk.enter("agent-a", role="observer", node="a")
    now, view = desk.service.now(), desk.service.training
    for step, at in ((4, now - 21), (5, now - 20)):
        view.note_step("agent-a", step, at)
    assert take_snapshot(desk.service).training.sentence == "Training: step 5, the last step 20 s ago, 1 node"
    desk.service.beat(agent, Beat(5, 5, 0.0, "stalled: rank 0 waits for rank 1"))
    found = take_snapshot(desk.service).training
    assert found.sentence == (
        "Looking into it: no progress for 20 s, at step 5, 1 node; rank 0 waits for rank 1"
    )
    assert found.state == "warn"


def test_steps_win_over_calls() -> None:
    """Where there are marks, calls say nothing more."""
    view, clock = trained()
    view.note_calls("agent-a", 7, clock.at)
    assert view.describe(ALL).sentence.startswith("Training: step 20")


def test_slow_steps_are_no_stall() -> None:
    """What is usual for this job counts."""
    view, clock = trained(6, pause_s=30.0)
    clock.at += 45
    found = view.describe(ALL)
    assert (found.sentence, found.state) == ("Training: step 6, 30.0 s per step, 3 of 3 replicas", "good")


def test_a_lost_replica_is_amber_and_named_until_it_is_back() -> None:
    """The second time it is known how long coming back takes."""
    view, clock = trained()
    view.happened(StatusEvent(1.0, "lost", "replica-2 lost: connection closed", "replica-2"))
    clock.at += 1
    view.note_step("replica-0", 22, clock.at)
    found = view.describe(TWO)
    assert found.state == "warn" and found.sentence.endswith(
        "2 of 3 replicas, replica-2 lost 1 s ago (connection closed)"
    )
    assert view.departed["replica-2"].reason == "connection closed"
    clock.at += 19
    view.happened(StatusEvent(2.0, "connected", "replica-2 connected", "replica-2"))
    assert view.departed == {}
    view.happened(StatusEvent(3.0, "lost", "replica-2 lost: connection closed", "replica-2"))
    view.note_step("replica-0", 60, clock.at)
    assert view.describe(TWO).sentence.endswith("2 of 3 replicas, replica-2 back in about 20 s")


def test_an_evicted_replica_is_missing_until_its_process_is_back() -> None:
    """Evicted while frozen, killed, readmitted, started again: amber and named all the time."""
    view, _ = trained()
    told = [("lost", "stopped"), ("evicted", "stuck"), ("returned", ""), ("lost", "exited"), ("let_in", "")]
    for kind, why in told:
        view.happened(StatusEvent(1.0, kind, f"replica-2 {kind}: {why}", "replica-2"))
    found = view.describe(TWO)
    assert found.state == "warn" and found.sentence.endswith(
        ", 2 of 3 replicas, replica-2 lost 1 s ago (exited)"
    )
    view.happened(StatusEvent(2.0, "connected", "replica-2 connected", "replica-2"))
    found = view.describe(Scene(members=2, alive=ALL.alive, joining=("replica-2",)))
    assert found.state == "warn" and found.sentence.endswith(", 2 of 3 replicas, replica-2 joining")


def test_a_replica_that_is_evicted_and_readmitted_while_connected_is_there_at_once() -> None:
    """By hand, without a restart between; a later loss is counted from that loss."""
    view, clock = trained()
    view.happened(StatusEvent(1.0, "evicted", "replica-2 evicted: by hand", "replica-2"))
    assert view.describe(Scene(members=2, alive=ALL.alive)).sentence.endswith(
        ", 2 of 3 replicas, replica-2 evicted"
    )
    view.happened(StatusEvent(1.0, "let_in", "replica-2 may rejoin", "replica-2"))
    assert view.describe(ALL).state == "good" and view.departed == {}
    clock.at += 100
    view.note_step("replica-0", 21, clock.at)
    view.happened(StatusEvent(2.0, "lost", "replica-2 lost: gone", "replica-2"))
    assert view.describe(TWO).sentence.endswith("replica-2 lost 1 s ago (gone)")


def test_agents_are_no_replicas() -> None:
    """A job without replicas speaks of its nodes; an agent that goes is not missed as a replica."""
    view, _ = trained()
    view.happened(StatusEvent(1.0, "lost", "node n1 lost: gone", "agent-n1"))
    assert view.describe(Scene(members=0, nodes=2)).sentence == "Training: step 20, 2.0 steps/s, 2 nodes"


def test_before_the_first_step_and_after_the_last() -> None:
    """Starting is amber, nobody left is red, the end is green."""
    assert TrainingView(Clock()).describe(
        Scene(members=1, alive=("replica-0",), waiting="waiting for replica-1")
    ).sentence == ("Starting, 1 replica: waiting for replica-1")
    view, _ = trained()
    assert view.describe(Scene()).state == "bad"
    found = view.describe(Scene(members=3, over=True))
    assert (found.sentence, found.state) == ("Finished at step 20", "good")


def test_a_restart_from_a_checkpoint_counts_from_there() -> None:
    """The step may go back; the speed is measured anew."""
    view, clock = trained()
    clock.at += 1
    view.note_step("replica-0", 10, clock.at)
    assert view.describe(ALL).step == 10 and view.describe(ALL).steps_per_s is None


def test_every_metric_is_documented_and_dashboard_and_alerts_use_what_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names that drift apart would show empty panels and never alert. Those of the ledger count, too."""
    monkeypatch.setattr(metrics, "SPENT", [lambda: {"useful": 1.0}])
    docs = Path(__file__).parent.parent.parent / "docs"
    status = Status(1, "a", True, "", 1, 1, "", "", None, (), {}, {}, (), (), 1.0, 0.0, 0)
    made = {line.split()[2] for line in render_metrics(status) if line.startswith("# TYPE")}
    assert set(re.findall(r"^\| `(allranks_\w+)", (docs / "tasks" / "watch.md").read_text(), re.M)) == made
    board, alerts = (
        (docs / "grafana" / "allranks.json").read_text(),
        (docs / "prometheus" / "alerts.yml").read_text(),
    )
    json.loads(board)
    for group in yaml.safe_load(alerts)["groups"]:
        assert all(rule["annotations"]["summary"] for rule in group["rules"])
    assert set(re.findall(r"allranks_\w+", board + alerts)) <= made


def test_replicas_that_left_do_not_train() -> None:
    """Between their good-bye and the end of the job."""
    view, _ = trained()
    view.happened(StatusEvent(1.0, "left", "replica-0 left: done", "replica-0"))
    found = view.describe(Scene(nodes=1))
    assert (found.sentence, found.state) == (
        "No replica is training: all have left; the last step was 20",
        "warn",
    )


def test_a_whole_job_whose_agents_are_lost_has_no_replica_to_miss() -> None:
    """Its line spoke of replicas that it never had."""
    for replicas, kind in ((0, "agent"), (2, "replica")):
        facts = JobFacts(begun=True, gone="lost", step=20, replicas=replicas)
        assert describe(facts).text == f"Stopped: no {kind} is connected; the last step was 20"


@on_loop
async def test_a_lighthouse_that_knows_no_rank_yet_draws_none_as_dead() -> None:
    """After its restart the chart of ranks that are alive fell to 0 for a moment."""
    service = Desk().service
    sample = take_sample(service, service.training.describe(Scene()), "")
    assert math.isnan(sample.alive) and math.isnan(sample.total)


def test_a_job_that_hangs_before_its_first_call_has_no_time_since_its_last_one() -> None:
    """ "Hung for 1 s", whatever the time."""
    hung = JobFacts(agents=(AgentState("hung", "rank 1 never joined"),))
    assert describe(hung).text == "Hung: rank 1 never joined"
    assert describe(JobFacts(agents=(AgentState("stalled"),))).text == "Looking into it: no progress"


def test_before_the_first_quorum_the_job_starts() -> None:
    """A replica that has only asked makes no steps; "0 of 2 replicas" counted neither the connected nor the expected ones."""
    view = TrainingView(Clock())
    view.note_step("replica-0", 0, 1.0)
    assert view.describe(Scene(alive=("replica-0",))).sentence == "Starting, 1 replica"


def test_a_line_does_not_repeat_how_long_ranks_had_waited_at_the_verdict() -> None:
    """ "1 rank has waited in it for 62 s" stood there after ten minutes."""
    joined = OpenIncident(
        "hang", "Rank 1 never called init_process_group; 1 rank has waited in it for 62 s; it sleeps"
    )
    hung = JobFacts(agents=(AgentState("hung"),), incidents=(joined,))
    assert (
        describe(hung).text == "Hung: rank 1 never called init_process_group; 1 rank waits in it; it sleeps"
    )


def test_a_rate_is_not_shown_when_its_last_call_or_step_is_old() -> None:
    """The line said "39 calls/s" for the ten seconds until a silence counts as a stall."""
    calls = JobFacts(calls=402, calls_per_s=39.0, usual_s=10.0, nodes=1, begun=True)
    assert describe(calls).text == "Running: 402 calls finished, 39.0 calls/s, 1 node"
    assert describe(replace(calls, silent_s=2.0)).text == describe(calls).text
    assert (
        describe(replace(calls, silent_s=4.0)).text
        == "Running: 402 calls finished, the last one 4 s ago, 1 node"
    )
    steps = JobFacts(step=5, steps_per_s=4.0, usual_s=60.0, silent_s=9.0, begun=True)
    assert describe(steps).text == "Training: step 5, the last step 9 s ago"
    slow = replace(steps, steps_per_s=0.2, silent_s=9.0)  # a step takes 5 s
    assert describe(slow).text == "Training: step 5, 5.0 s per step"


def test_a_whole_job_that_was_started_again_starts_over_unless_it_is_too_far_for_that() -> None:
    """What is possible in the time since the last step is taken for a start from 0; more must be a checkpoint."""
    view, clock = trained(steps=1000)
    clock.at += 10.0
    lost = view.note_step("replica-0", 3, clock.at)
    assert lost is not None and not lost.restored
    assert lost.text.startswith(
        "training starts over from step 0 after a restart: it had reached step 1000, and step 3 "
    )
    view, clock = trained(steps=1000)
    clock.at += 10.0
    lost = view.note_step("replica-0", 900, clock.at)
    assert lost is not None and lost.restored
    assert (
        lost.text == "training continues from a checkpoint of step 900 or earlier; it had reached step 1000"
    )
