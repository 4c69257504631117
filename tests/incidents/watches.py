"""A watch over hand-made black boxes, with a hand-set clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from allranks.incidents import pipeline
from allranks.incidents.evidence import Evidence, Observed, read_observed
from allranks.incidents.judge import correct
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.incidents.policy import Mode
from allranks.model.diagnosis import Action, Diagnosis, Finding, Incident
from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    RankState,
    Snapshot,
    StacksReport,
    ThreadFacts,
)
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
