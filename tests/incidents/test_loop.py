"""The loop between suspicion and action, over hand-made black boxes and a hand-set clock."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import main
from allranks.incidents import pipeline
from allranks.incidents.evidence import Evidence, Observed, read_observed
from allranks.incidents.folder import read_incidents
from allranks.incidents.judge import correct
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.incidents.policy import Mode, PolicyOptions
from allranks.launch.node_agent import NodeAgent
from allranks.model.cluster import read_health
from allranks.model.diagnosis import Action, Diagnosis, Finding, Incident
from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    RankState,
    Snapshot,
    StacksReport,
    ThreadFacts,
)
from allranks.supervise.replicas import Event, ReplicaOptions, Request, Supervisor
from allranks.watch.exits import Death
from allranks.watch.samples import read_samples
from allranks.watch.silence import NoticeOptions, Suspicion
from boxes import write_box

# the hand-set clock runs ahead of the real one, however long other tests take
START_S = time.monotonic() + 1e6
VERDICT = Finding("stuck_before_collective", (1,), "rank 1 is stuck", confidence=0.95)


@dataclass
class Hand:
    """An actor that remembers, or fails."""

    error: Exception | None = None
    done: list[Action] = field(default_factory=list)

    def act(self, action: Action, incident: Incident) -> str:
        """As asked."""
        if self.error is not None:
            raise self.error
        self.done.append(action)
        return "done"


def look(watch: Watch, at_s: float) -> Suspicion | None:
    """One turn of the watch."""
    return watch.look(START_S + at_s)


def trained(
    tmp_path: Path, hand: Hand, mode: Mode = "replica", retry_s: float | None = 60, **options: Any
) -> Watch:
    """A watch that has seen three replicas do thirty quick steps; its clock stands at 3.0 s."""
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    notice = NoticeOptions(floor_s=5, warm_up_marks=5, retry_s=retry_s)
    chosen = WatchOptions(
        boxes,
        tmp_path / "incidents",
        "job",
        mode=mode,
        replicas=3,
        collect_stacks=False,
        notice=notice,
        **options,
    )
    watch = Watch(chosen, actor=hand)
    for step in range(31):
        for rank in range(3):
            write_box(boxes, rank, step)
        assert look(watch, step / 10) is None
    return watch


def answer_with(
    monkeypatch: pytest.MonkeyPatch, verdict: Finding | None = None, stacks: StacksReport | None = None
) -> None:
    """Every examination finds this in boxes and stacks; the judge has the last word. Without `stacks`, the ranks that the
    verdict names sleep for a year."""

    boxes = Diagnosis("fault" if verdict is not None else "unclear", verdict)
    guilty = verdict.ranks if verdict is not None and stacks is None else ()
    if stacks is None:
        ranks = {r: RankState(r, "sleep" if r in guilty else "collective_wait", "", "") for r in range(3)}
        stacks = StacksReport(hung=True, culprits=guilty, sentence="", ranks=ranks)
    asleep = (Snapshot(0, facts=(ThreadFacts(1, state="S", syscall="clock_nanosleep", wait_s=3e7),)),)
    capture = Capture(tuple(ProcessCapture(rank, snapshots=asleep) for rank in guilty))
    report = stacks

    def judged(evidence: Evidence) -> Diagnosis:
        return correct(boxes, evidence.report, evidence.observed or Observed())

    def read(folder: Path) -> Evidence:
        return Evidence(reports=(report,), observed=read_observed(folder), captures=(capture,))

    monkeypatch.setattr(pipeline, "read_incident", read)
    monkeypatch.setattr(pipeline, "judge", judged)


def test_a_failing_page_webhook_or_actor_does_not_lose_the_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback that gets the incident raises, and so does the one that should act: the story is complete on disk and says so."""
    answer_with(monkeypatch, VERDICT)
    watch = trained(tmp_path, Hand(error=RuntimeError("no supervisor")))

    def fails(incident: Incident) -> None:
        raise ValueError("refused")

    watch.join(None, fails)
    for now in (8.1, 10.7):
        assert look(watch, now) is not None
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["action"]["kind"] == "evict" and story["action"]["done"] is False
    assert "no supervisor" in story["action"]["result"]
    assert (tmp_path / "incidents" / story["id"] / "story.html").exists()


def test_from_the_first_suspicion_on_the_lighthouse_is_notified_of_a_stall_then_of_the_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page stayed green until the verdict was there."""
    answer_with(monkeypatch, VERDICT)
    watch = trained(tmp_path, Hand(), policy=PolicyOptions(enabled=False))
    said: list[str] = []
    watch.on_look = lambda step, calls, health: said.append(read_health(health)[0])
    for now in (3.1, 8.1, 8.2, 10.7, 10.8):
        look(watch, now)
    (incident,) = read_incidents(tmp_path / "incidents")
    assert incident["verdict"]["sentence"] == "rank 1 is stuck"
    assert said == ["moving", "moving", "stalled", "stalled", "hung"]


def test_a_job_without_step_marks_has_no_last_good_step_minus_one(tmp_path: Path) -> None:
    """Its story says the call that ranks came to."""
    watch = trained(tmp_path, Hand())
    samples = [replace(sample, step=-1) for sample in read_samples(tmp_path / "boxes")]
    opened = watch.hangs._open(Suspicion(0.0, 9.0, 5.0, (0, 1, 2)), -1, samples)
    last = next(moment for moment in opened.current.timeline if moment.name == "last good step")
    assert last.text == "call 60"


def test_a_second_hang_soon_after_waits_for_the_back_off_in_one_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither given up nor reported again and again; it is answered when the back-off is over."""
    answer_with(monkeypatch, VERDICT)
    hand = Hand()
    watch = trained(tmp_path, hand, policy=PolicyOptions(back_off_s=4))
    watch.hangs.policy = watch.hangs.policy.after(time.monotonic(), 0, 3600)
    look(watch, 8.1)
    look(watch, 10.7)
    assert hand.done == []
    now = 10.7
    while not hand.done:
        now += 0.01
        look(watch, now)
    assert [action.replica for action in hand.done] == [1]
    assert len(read_incidents(tmp_path / "incidents")) == 1


def dry_run(tmp_path: Path, hand: Hand) -> Watch:
    """A whole job of three ranks that has done thirty quick steps, watched without --recovery; 3.0 s on the clock."""
    return trained(tmp_path, hand, mode="whole_job", retry_s=None)


def test_a_hang_that_goes_on_stays_one_incident_that_knows_how_long_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody acts (dry run): two minutes later there is one incident, published once, and its duration has grown."""
    answer_with(monkeypatch, VERDICT)
    watch = dry_run(tmp_path, Hand())
    published: list[str] = []
    watch.join(None, lambda incident: published.append(incident.id))
    for tenths in range(31, 1230, 4):
        look(watch, tenths / 10)
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["action"]["kind"], story["ranks"]) == ("hang", "dry_run", [1])
    assert story["durations_s"]["lasted"] > 100
    assert len(published) == 2  # before and after the action that was not taken
    watch.expect_end([])
    assert watch.hung_at_end  # the last line of the command repeats the verdict
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, 31)
    look(watch, 124.0)
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["closed"] is not None and story["timeline"][-1]["name"] == "recovered"


def test_ranks_that_are_asked_to_end_and_take_their_time_are_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C on a job whose ranks wait in a collective: they are killed 30 s later, which is not an incident."""
    answer_with(monkeypatch, VERDICT)
    watch = dry_run(tmp_path, Hand())
    watch.expect_end([os.getpid()])  # the writer of these boxes
    assert [look(watch, at) for at in (8.1, 10.7, 33.0)] == [None, None, None]
    assert read_incidents(tmp_path / "incidents") == []


def test_what_is_read_from_ranks_that_are_asked_to_end_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the second look: its stacks are of an interpreter that ends. The first look stays."""
    before = RankState(1, "sleep", "train.py:8 in load", "")
    ranks = {0: RankState(0, "collective_wait", "", ""), 1: before}
    answer_with(monkeypatch, VERDICT, StacksReport(hung=True, culprits=(1,), sentence="", ranks=ranks))
    watch = dry_run(tmp_path, Hand())
    look(watch, 8.1)
    after = {**ranks, 1: replace(before, where="")}
    answer_with(monkeypatch, VERDICT, StacksReport(hung=True, culprits=(1,), sentence="", ranks=after))
    read = pipeline.read_incident

    def read_while_ending(folder: Path) -> Evidence:
        watch.expect_end([os.getpid()])
        return read(folder)

    monkeypatch.setattr(pipeline, "read_incident", read_while_ending)
    look(watch, 60.0)
    (story,) = read_incidents(tmp_path / "incidents")
    assert story["kind"] == "stall"
    assert "sleeps at train.py:8 in load; the job was stopped" in story["timeline"][-1]["text"]


def test_an_incident_without_stacks_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict "at an unknown line" did not tell that py-spy was not installed where the agent runs."""
    shots = (Snapshot(0, facts=(ThreadFacts(1, state="S", syscall="read"),)),)
    capture = Capture((ProcessCapture(0, snapshots=shots),), notes=("py-spy was not found",))
    monkeypatch.setattr(pipeline, "find_targets", lambda chosen: [])
    monkeypatch.setattr(pipeline, "collect", lambda targets, options: capture)
    write_box(tmp_path, 0, 3)
    whole = pipeline.IncidentPipeline(WatchOptions(tmp_path, tmp_path / "incidents", "job"))
    opened = whole.open("stall", "silent", samples := read_samples(tmp_path))
    whole.examine(opened, samples, Observed(), stacks_of=samples)
    assert "py-spy was not found" in opened.current.missing
    assert "stacks of rank 0: nothing could be read" in opened.current.missing


def test_a_rank_that_raised_and_does_not_end_is_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception has an incident of its own, which explains its end, and it hangs in an exit handler."""
    answer_with(monkeypatch, VERDICT)
    watch = dry_run(tmp_path, Hand())
    watch.pipeline.explained.add([os.getpid()])
    for at_s in (8.1, 10.7, 60.0):
        look(watch, at_s)
    assert [story["kind"] for story in read_incidents(tmp_path / "incidents")] == ["hang"]


def test_a_second_hang_after_the_job_went_on_is_another_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is explained; progress ends it."""
    answer_with(monkeypatch, VERDICT)
    watch = dry_run(tmp_path, Hand())
    for tenths in range(31, 300, 4):
        look(watch, tenths / 10)
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, 31)
    for tenths in range(300, 1600, 4):
        look(watch, tenths / 10)
    assert [story["kind"] for story in read_incidents(tmp_path / "incidents")] == ["hang", "hang"]


def test_an_unclear_hang_is_judged_again_in_the_same_incident_until_it_can_be_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica mode: the first verdict names nobody, so nobody is evicted; a later one names rank 1."""
    answer_with(monkeypatch, Finding("none_finished", (), "all entered, none finished", confidence=0.9))
    hand = Hand()
    watch = trained(tmp_path, hand)
    for tenths in range(31, 700, 4):
        look(watch, tenths / 10)
    assert hand.done == []
    answer_with(monkeypatch, VERDICT)
    assert watch.hangs.standstill is not None
    watch.hangs.standstill.next_s = 0.0
    look(watch, 71.0)
    assert [action.replica for action in hand.done] == [1]
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["verdict"]["cause"], story["action"]["kind"]) == (VERDICT.cause, "evict")


def test_a_rank_that_burns_cpu_is_a_stall_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection looks like an endless loop; the story says once what the rank does."""
    busy = RankState(1, "busy_python", "train.py:7 in loop", "")
    ranks = {0: RankState(0, "collective_wait", "", ""), 1: busy}
    answer_with(monkeypatch, VERDICT, StacksReport(hung=True, culprits=(1,), sentence="", ranks=ranks))
    hand = Hand()
    watch = trained(tmp_path, hand)
    for tenths in range(31, 450, 4):
        look(watch, tenths / 10)
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["verdict"], story["action"], hand.done) == ("stall", None, None, [])
    told = [moment["text"] for moment in story["timeline"] if moment["name"] == "sampled again"]
    assert told == ["rank 1 runs Python code at train.py:7 in loop"]
    for tenths in range(450, 650, 4):
        if not hand.done:
            look(watch, tenths / 10)
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["verdict"]["ranks"], len(hand.done)) == ("hang", [1], 1)
    assert "waiting costs about" in story["action"]["reason"]


def test_a_stall_that_ends_is_one_line_and_diagnose_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never "a hang at 95 %": no verdict, no action, no fault."""
    busy = RankState(1, "sleep", "train.py:7 in retry", "")
    ranks = {0: RankState(0, "collective_wait", "", ""), 1: busy}
    with monkeypatch.context() as patch:
        answer_with(patch, VERDICT, StacksReport(hung=True, culprits=(1,), sentence="", ranks=ranks))
        patch.setattr(pipeline.IncidentPipeline, "settle", lambda *args, **how: None)
        watch = trained(tmp_path, Hand(), mode="whole_job", retry_s=None)
        for tenths in range(31, 250, 4):
            look(watch, tenths / 10)
    for rank in range(3):
        write_box(tmp_path / "boxes", rank, 31)
    look(watch, 26.0)
    (story,) = read_incidents(tmp_path / "incidents")
    ended = story["timeline"][-1]
    assert (story["kind"], story["verdict"], story["action"]) == ("stall", None, None)
    assert story["closed"] and ended["name"] == "ended"
    assert ended["text"].startswith("stalled for ") and "rank 1 sleeps at train.py:7" in ended["text"]
    assert main(["diagnose", "--json", story["folder"]]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["verdict"], len(said["findings"])) == ("ok", None, 1)
    assert said["findings"][0]["sentence"] == ended["text"]


def test_the_first_look_at_the_stacks_is_brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds on a busy node, and the first sample never settles a hang."""
    asked: list[int] = []

    def collect(self: object, folder: Path, samples: object, missing: object, look: int) -> None:
        asked.append(look)

    monkeypatch.setattr(pipeline.IncidentPipeline, "_collect_stacks", collect)
    answer_with(monkeypatch, VERDICT)
    watch = trained(tmp_path, Hand())
    for tenths in range(31, 200, 4):
        look(watch, tenths / 10)
    assert asked == [0, 1]


def test_a_loop_of_collectives_inside_one_step_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole-job mode: ranks with marks complete calls for ten minutes and no step. Calls are no progress then."""
    answer_with(monkeypatch)
    watch = dry_run(tmp_path, Hand())
    for second in range(4, 600):
        for rank in range(3):
            write_box(tmp_path / "boxes", rank, 30, calls=60 + second)
        look(watch, float(second))
        if watch.hangs.standstill is not None:
            watch.hangs.standstill.next_s = 0.0
    (story,) = read_incidents(tmp_path / "incidents")
    assert (story["kind"], story["step"], story["ranks"]) == ("hang", 30, [])
    assert "no step" in story["verdict"]["sentence"] and "collectives" in story["verdict"]["sentence"]


def test_a_watch_reports_only_the_ranks_of_its_own_agent(tmp_path: Path) -> None:
    """Two agents on one host share the folder of the job: process 1 is not a child of this one."""
    watch = trained(tmp_path, Hand())
    write_box(tmp_path / "boxes", 3, 30, pid=1)
    look(watch, 3.1)
    assert watch.ranks == (0, 1, 2)


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


def test_a_standstill_that_begins_while_another_suspicion_is_examined_is_noticed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pause is still being looked into when the job hangs soon after it: that is logged at once, examined next."""
    answer_with(monkeypatch, VERDICT)
    watch = trained(tmp_path, Hand())
    done = threading.Event()
    watch._examining = threading.Thread(target=done.wait)
    watch._examining.start()
    for moment in (8.5, 9.0):
        look(watch, moment)
    assert caplog.text.count("it is examined next") == 1
    noticed = time.time()
    done.set()
    watch._examining.join()
    look(watch, 12.0)
    (story,) = read_incidents(tmp_path / "incidents")
    (at,) = [moment["at"] for moment in story["timeline"] if moment["name"] == "noticed"]
    assert at <= noticed < story["opened"]


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
    agent._happened(Event("finished", 0, 0.0))
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
