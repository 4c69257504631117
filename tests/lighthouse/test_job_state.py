"""Page, status, top and metrics say one thing, at every moment of every timeline; and it is what the agents say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.cli.status import render
from allranks.lighthouse.messages import Beat
from allranks.lighthouse.page import page_view, take_snapshot
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import JobView, PublishedIncident, RankRow, write_health
from allranks.model.job_state import AgentState, JobFacts, OpenIncident, describe

from .without_sockets import Desk, on_loop

EVENTS = ("step", "wait", "suspect", "verdict", "act", "move", "close", "second agent suspects")
SENTENCE = "Rank 2 (vm) never entered all_reduce #6 of group default_pg; it is at hang.py:7 in load_batch"


@dataclass
class Timeline:
    """A job that hangs and recovers in any order of events, as its lighthouse sees it."""

    service: Service
    agents: tuple[Session, Session]
    step: int = 5
    motion: list[str] = field(default_factory=lambda: ["moving", "moving"])
    incident: PublishedIncident | None = None

    def happen(self, event: str) -> None:
        if event == "step":
            self.step += 1
        elif event == "suspect":
            self.motion[0] = "stalled"
        elif event == "second agent suspects":
            self.motion[1] = "stalled"
        elif event == "verdict":
            self.motion[0] = "hung"
            self.incident = PublishedIncident(
                "i1", SENTENCE, kind="hang", at=1.0, ranks=(2,), decided="Not restarted"
            )
        elif event == "act" and self.incident is not None:
            self.motion[0] = "moving"
            self.incident = replace(self.incident, outcome="rank 2 was ended; the launcher restarts the job")
        elif event == "move":
            self.motion[:] = ["moving", "moving"]
        elif event == "close" and self.incident is not None:
            self.motion[0] = "moving"
            self.incident = replace(self.incident, closed=True)
        for agent, motion in zip(self.agents, self.motion, strict=True):
            health = write_health(motion, "ranks 0, 1 wait for rank 2")  # type: ignore[arg-type]
            self.service.beat(agent, Beat(self.step, self.step, 0.0, "" if motion == "moving" else health))
        if self.incident is not None:
            self.service.agents.report_incident(self.incident)


def check(line: Timeline) -> None:
    """Nobody disagrees, and nobody contradicts the agents."""
    view: dict[str, Any] = page_view(line.service)
    words = view["line"]
    status = take_snapshot(line.service).training
    assert (status.sentence, status.state, status.word) == (words["text"], words["level"], words["state"])
    row = RankRow(0, 1, "n", True, line.step, 1, 1.0, "computes", (1,))
    told = tuple(
        f"{one['id']} ({one['kind']}, {'closed' if one['closed'] else 'open'}): x"
        for one in view["incidents"]
    )
    shown = list(
        render(JobView("j", "/x", 0.0, (row,), "", words["text"], words["level"], words["state"], told))
    )
    assert words["text"] in shown
    hung, stalled = "hung" in line.motion, "stalled" in line.motion
    assert (words["level"] == "bad") == hung, words
    assert (words["state"] == "looking") == (stalled and not hung)
    if hung or stalled:
        assert words["level"] != "good" and not words["text"].startswith(("Training", "Running"))
        assert status.steps_per_s is None and view["sample"]["steps_per_s"] == 0.0
    if hung:
        assert "hang.py:7 in load_batch" in words["text"]
    open_hang = any(one["kind"] == "hang" and not one["closed"] for one in view["incidents"])
    assert not (open_hang and words["level"] == "good")
    assert ("wait" in "\n".join(shown[2:4])) == (words["state"] in ("looking", "hung"))


@settings(max_examples=150)
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_no_timeline_makes_two_renderers_disagree(events: list[str]) -> None:
    """Every prefix is a moment at which somebody may look."""

    @on_loop
    async def play() -> None:
        desk = Desk()
        agents = tuple(desk.enter(f"agent-{name}", role="observer", node=name)[0] for name in "ab")
        line = Timeline(desk.service, agents)  # type: ignore[arg-type]
        frozen = desk.service.now()
        desk.service.training.now = lambda: frozen
        for step in range(5):
            desk.service.beat(agents[0], Beat(step, step))
        for event in events:
            line.happen(event)
            check(line)

    play()


def facts() -> Iterator[JobFacts]:
    for motion in ("moving", "stalled", "hung"):
        for opened in ((), (OpenIncident("hang", SENTENCE),), (OpenIncident("hang", SENTENCE, "ended"),)):
            for step in (-1, 5):
                for replicas, members in ((0, 0), (3, 3), (3, 2)):
                    for begun in (True, False):
                        yield JobFacts(
                            (AgentState(motion, "x"),), opened, step, 2.0, 9, None, 12.0, 3.0, members, replicas, 2, begun
                        )  # fmt: skip


def test_the_colour_is_the_agents_in_every_state_of_the_job() -> None:
    """Amber from the suspicion, red from the verdict; green only while they move."""
    for one in facts():
        found, motion = describe(one), one.agents[0].motion
        assert (found.level == "bad") == (motion == "hung")
        assert (found.state == "looking") == (motion == "stalled")
        assert found.level != "good" or (motion == "moving" and one.begun and one.members >= one.replicas)
        assert found.text and "-1" not in found.text


def test_the_line_has_one_time_and_counts_on() -> None:
    """ "Hung for 3 min 46 s: …; 2 ranks have waited 16 s": the second time was that of the verdict."""
    for waited, wait in (
        ("2 ranks have waited 16 s", "2 ranks wait for it"),
        ("1 rank has waited 1 min 12 s", "1 rank waits for it"),
    ):
        sentence = (
            f"Rank 2 (vm) never entered all_reduce #66; {waited}; it is at hang.py:6 in load_batch (sleep)"
        )
        facts = JobFacts((AgentState("hung"),), (OpenIncident("hang", sentence),), silent_s=226.0)
        plain = f"rank 2 (vm) never entered all_reduce #66; {wait}; it is at hang.py:6 in load_batch (sleep)"
        assert describe(facts).text == f"Hung for 3 min 46 s: {plain}"
