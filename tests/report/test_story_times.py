"""A story agrees with its timeline: one clock, one meaning of each word."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from allranks.incidents.folder import open_incident
from allranks.incidents.pipeline import Recoveries
from allranks.model.diagnosis import Action, Finding, Incident, Moment
from allranks.model.trace import Frame
from allranks.report.story import decision, lasted, rank_evidence, render_story
from allranks.watch.samples import RankSample

BEGIN = 1.7e9
DEATH = Incident(
    id="20260301-030000", kind="death", job="j", opened=BEGIN + 0.14, reason="rank 1 died of SIGKILL", ranks=(1,),
    verdict=Finding("rank_died", (1,), "rank 1 died of SIGKILL"),
    timeline=(
        Moment("last good step", BEGIN, "step 7"), Moment("died", BEGIN + 0.136), Moment("noticed", BEGIN + 0.14),
        Moment("recovered", BEGIN + 0.637, "2 ranks train again, at step 9"), Moment("back", BEGIN + 28.5, "1 rank trains again"),
    ),
    durations_s={"noticed": 0.004, "recovered": 0.178}, closed=BEGIN + 0.637,
)  # fmt: skip


def cards(page: str) -> dict[str, str]:
    return dict(re.findall(r'<div class="fact"><span>(.*?)</span><b>(.*?)</b>', page))


def test_the_cards_say_what_the_timeline_says() -> None:
    """It said "Recovered in 178 ms" beside a recovery at +0.637 s, and the 28 s until the replica was back nowhere."""
    page = render_story(DEATH)
    shown = cards(page)
    assert (
        shown["Others continued after"] == "637 ms" and shown["Back after"] == "28 s" == shown["Back after"]
    )
    assert shown["Noticed after"] == "140 ms" and "Recovered in" not in shown
    assert "+0.6 s" in page and "+28.5 s" in page


def test_the_victim_of_a_kill_is_not_guilty() -> None:
    """Its story names the rank; a hang still has a guilty one."""
    assert "Guilty" not in render_story(DEATH) and cards(render_story(DEATH))["Rank"] == "1"
    assert cards(render_story(replace(DEATH, kind="hang")))["Guilty rank"] == "1"


def test_what_was_not_done_is_said_in_plain_words() -> None:
    """ "stuck_before_collective of rank 2 (confidence 0.95) (--recovery on does it)" was an identifier in prose."""
    would = Action(
        "dry_run", "would restart the job: rank 2: stuck before collective (95% sure) (--recovery on does it)"
    )
    assert decision(would) == "Nothing was done: --recovery on would restart the job"
    assert decision(replace(would, done=True)) == "" == decision(None)
    assert round(lasted(DEATH, BEGIN + 99), 3) == 0.637


def test_a_replica_that_trains_again_is_back_and_no_step_is_minus_one(tmp_path: Path) -> None:
    """Recovered when the others continue; back when it makes progress in a new process."""
    opened = open_incident(tmp_path, kind="death", job="j", reason="x", ranks=(1,))
    before = [RankSample(rank, 100 + rank, "", True, -1, 5, 5, 0, 0) for rank in range(3)]
    recoveries = Recoveries()
    recoveries.add(opened, before, (1,))
    others = [replace(one, calls_completed=6) for one in before if one.rank != 1]
    assert list(recoveries.look([*others, replace(before[1], alive=False)])) == [opened]
    assert list(recoveries.look([*others, replace(before[1], pid=7, start_ns=9, calls_completed=0)])) == []
    assert list(recoveries.look([*others, replace(before[1], pid=7, start_ns=9, calls_completed=2)])) == [
        opened
    ]
    names = {moment.name: moment.text for moment in opened.current.timeline}
    assert names == {"recovered": "2 ranks train again", "back": "1 rank trains again"}
    assert opened.current.closed is not None and opened.current.closed <= time.time()


def test_the_source_is_that_of_the_line_where_the_guilty_rank_is(tmp_path: Path) -> None:
    """Beside a stack at train.py:2 stood the line of the rank's last finished call, train.py:4; and our own frames below it."""
    script = tmp_path / "train.py"
    script.write_text("def load():\n    time.sleep(600)\nload()\nloss.backward()\n")
    live, last = (Frame("load", str(script), 2),), (Frame("<module>", str(script), 4),)
    verdict = Finding("stuck_before_collective", (2,), "x", stacks=(((2,), live), ((2,), last)))
    starts = ("__main__.py:82 in _run", "__main__.py:53 in main", "rank_entry.py:64 in <module>")
    seen = {"2": {"cause": "sleep", "where": "train.py:2 in load", "stack": ["train.py:2 in load", *starts]}}
    (found,) = rank_evidence(replace(DEATH, ranks=(2,), verdict=verdict, stacks={"ranks": seen}))
    assert found.source is not None and found.source.title == f"{script}:2"
    assert found.stack == ("train.py:2 in load",)
