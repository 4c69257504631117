"""The loop between suspicion and action, over hand-made black boxes and a hand-set clock."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.incidents import pipeline
from allranks.incidents.evidence import Evidence, Observed, read_observed
from allranks.incidents.folder import read_incidents
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.incidents.policy import PolicyOptions
from allranks.model.diagnosis import Finding, Incident
from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    RankState,
    Snapshot,
    StacksReport,
    ThreadFacts,
)
from allranks.watch.samples import read_samples
from allranks.watch.silence import Suspicion
from boxes import write_box

from .watches import VERDICT, Hand, answer_with, look, trained


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
    watch.on_look = lambda step, calls, motion, reason: said.append(motion)
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
    observed = read_observed(next((tmp_path / "incidents").iterdir()))
    assert observed is not None and not observed.ended  # the ranks never moved again: not "nothing wrong"


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


def test_requested_evidence_is_as_old_as_its_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks take seconds, in which a job that trains goes on: the calls of its copied boxes looked stuck for so long."""
    sampled_ns: list[int] = []
    whole = pipeline.IncidentPipeline(WatchOptions(tmp_path, tmp_path / "incidents", "job"))
    monkeypatch.setattr(whole, "_collect_stacks", lambda *_: sampled_ns.append(time.time_ns()))
    write_box(tmp_path, 0, 3)
    observed = read_observed(whole.collect_now("asked for").path)
    assert observed is not None and 0 < observed.taken_ns <= sampled_ns[0]


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
    assert (
        story["id"].replace("-", "").isdigit() and Path(story["folder"]).name == story["id"]
    )  # it began as a stall


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
    assert said["summary"][0].startswith(
        f"evidence of incident {story['id']}, collected "
    )  # its words are as old


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
