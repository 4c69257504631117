"""The page in a real browser: no network, no script but ours, quick with a thousand ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from allranks.diagnose import diagnose
from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import CALL, Frame, Group, RankTrace, Shapes, State, TraceHeader
from allranks.report import html, perfetto

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (make packages)")
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def make_traces(ranks: int, calls: int, name: str = "all_reduce", stuck: int = 1) -> list[RankTrace]:
    """A job whose rank `stuck` never entered the last call."""
    rows = np.zeros(calls, CALL)
    rows["begin"] = rows["end"] = np.arange(1, calls + 1)
    rows["created_ns"] = 10**18 + np.arange(calls) * 3_000_000
    rows["completed_ns"] = rows["created_ns"] + 1_000_000
    rows["seq"] = np.arange(1, calls + 1)
    rows["in_numel"] = rows["out_numel"] = 4
    rows["group"] = rows["op"] = rows["shapes"] = rows["stack"] = 1
    rows["peer"] = rows["root"] = rows["step"] = -1
    rows["state"] = State.COMPLETED
    shapes = (Shapes(), Shapes(((4,),), ((4,),), ("Float",), ("Float",)))
    stacks = ((), (Frame(name, "/lib/torch/c10d.py", 1), Frame("train", "/home/me/train.py", 44)))
    groups = (Group(""), Group("0", "default_pg", tuple(range(ranks)), "nccl"))
    found = []
    for rank in range(ranks):
        mine = rows.copy()
        mine["state"][-1], mine["completed_ns"][-1] = State.STARTED, 0
        if rank == stuck:
            mine = mine[:-1]
        found.append(
            RankTrace(
                TraceHeader(rank=rank, world_size=ranks, host=f"node{rank // 8}"),
                mine,
                groups,
                ("", name),
                shapes,
                stacks,
            )
        )
    return found


def write_page(path: Path, traces: list[RankTrace], diagnosis: Diagnosis | None = None) -> Path:
    path.write_text("".join(html.render(diagnosis or diagnose(traces), traces)))
    return path


@pytest.fixture(scope="module")
def browser(keep_child: set[int]) -> Iterator[object]:
    """One browser for all pages."""
    import os
    import threading

    from playwright.sync_api import sync_playwright

    before = set(threading.enumerate())
    with sync_playwright() as play:
        running = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for thread in set(threading.enumerate()) - before:
            thread.allranks_session = True  # type: ignore[attr-defined]
        tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
        keep_child.update(int(pid) for task in tasks for pid in (task / "children").read_text().split())
        yield running
        running.close()


class Visit:
    """A page with everything that went wrong on it."""

    def __init__(self, browser: object, path: Path, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=scheme)  # type: ignore[attr-defined]
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]", timeout=60_000)

    def pixels(self, color: str) -> int:
        """How many pixels of the timeline have about this colour."""
        return int(self.page.evaluate(
            """(color) => { const c = document.getElementById('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            const [r, g, b] = JSON.parse(color); let n = 0;
            for (let i = 0; i < d.length; i += 4) if (Math.abs(d[i]-r) + Math.abs(d[i+1]-g) + Math.abs(d[i+2]-b) < 12) n++;
            return n; }""", color))  # fmt: skip


ORANGE = "[249, 147, 31]"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_verdict_timeline_groups_and_stacks(
    browser: object, tmp_path: Path, scheme: str
) -> None:
    """From a file, with no request to anywhere and no error."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(8, 20)), scheme)
    assert "rank 1 (node0) never entered all_reduce #20" in visit.page.text_content("#sentence")
    assert "missing_rank" in visit.page.text_content("#scope")
    assert "train.py:44 in train" in visit.page.text_content("#stacks")
    assert "default_pg" in visit.page.text_content("#groups")
    assert visit.pixels(ORANGE) > 500  # seven open calls reach to the right edge
    assert visit.errors == []
    assert visit.requests == [(tmp_path / "page.html").as_uri()]
    visit.page.close()


def test_search_counts_and_dims(browser: object, tmp_path: Path) -> None:
    """By operation, by line, by rank, by number."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(8, 20)))
    for query, count in (
        ("all_reduce", "159 calls"),
        ("train.py:44", "159 calls"),
        ("rank 1", "19 calls"),
        ("#20", "7 calls"),
        ("nonsense", "0 calls"),
    ):
        visit.page.fill("#search", query)
        assert visit.page.text_content("#count") == count
    visit.page.wait_for_function(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    )
    assert visit.pixels(ORANGE) == 0
    visit.page.close()


def test_a_click_shows_the_stack_of_a_call(browser: object, tmp_path: Path) -> None:
    """With sizes, state and time."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(2, 4)))
    box = visit.page.locator("#canvas").bounding_box()
    visit.page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 40)
    detail = visit.page.text_content("#detail")
    assert (
        "all_reduce #4 of default_pg" in detail
        and "not finished" in detail
        and "train.py:44 in train" in detail
    )
    visit.page.close()


def test_hostile_names_stay_text(browser: object, tmp_path: Path) -> None:
    """Group, operation, file and host names that are markup are shown, not run."""
    traces = make_traces(3, 5, name=EVIL)
    groups = (Group(""), Group(EVIL, EVIL, (0, 1, 2), EVIL))
    stacks = ((), (Frame(EVIL, EVIL, 1),))
    hostile = [
        RankTrace(
            TraceHeader(rank=t.header.rank, world_size=3, host=EVIL),
            t.calls,
            groups,
            ("", EVIL),
            t.shapes,
            stacks,
        )
        for t in traces
    ]
    path = write_page(tmp_path / "page.html", hostile)
    assert path.read_text().count("<script") == 9  # two of JSON, six columns, one of ours
    visit = Visit(browser, path)
    assert EVIL in visit.page.text_content("#sentence")
    assert visit.page.title() == "allranks diagnose"
    assert visit.page.locator("img").count() == 0
    assert visit.errors == []
    visit.page.close()


def test_a_thousand_ranks_with_two_thousand_calls_stay_usable(browser: object, tmp_path: Path) -> None:
    """Two million calls are drawn, searched and moved through without an error."""
    traces = make_traces(1024, 2000, stuck=515)
    visit = Visit(browser, write_page(tmp_path / "page.html", traces))
    assert "rank 515 (node64) never entered" in visit.page.text_content("#sentence")
    visit.page.click("#all")
    visit.page.fill("#search", "rank 515")
    assert visit.page.text_content("#count") == "1,999 calls"
    visit.page.click("#fault")
    visit.page.mouse.move(700, 500)
    visit.page.mouse.wheel(0, -300)
    visit.page.wait_for_function(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    )
    assert visit.errors == []
    visit.page.close()


def test_a_job_without_calls_still_makes_a_page(browser: object, tmp_path: Path) -> None:
    """Nothing to draw, and nothing breaks."""
    visit = Visit(browser, write_page(tmp_path / "page.html", []))
    assert visit.errors == []
    visit.page.close()


def test_the_perfetto_trace_is_valid_and_complete() -> None:
    """One event per call, one process per rank, open calls drawn to the end."""
    traces = make_traces(4, 6)
    body = json.loads("".join(perfetto.render(diagnose(traces), traces)))
    calls = [event for event in body["traceEvents"] if event["ph"] == "X"]
    assert len(calls) == 23
    assert {event["pid"] for event in calls} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in calls) > 15_000
    names = {event["args"]["name"] for event in body["traceEvents"] if event["name"] == "process_name"}
    assert "rank 1 (node0) GUILTY" in names
