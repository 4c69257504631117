"""The page in a real browser: no network, no script but ours, quick with a thousand ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose
from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Frame, Group, RankTrace, TraceHeader
from allranks.report import html
from pages.gallery import Visit as Looked
from pages.gallery import make_traces, running_browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (make packages)")
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def write_page(path: Path, traces: list[RankTrace], diagnosis: Diagnosis | None = None) -> Path:
    path.write_text("".join(html.render(diagnosis or diagnose(traces), traces)))
    return path


@pytest.fixture(scope="module")
def browser(keep_child: set[int]) -> Iterator[Any]:
    """One browser for all pages."""
    with running_browser(keep_child) as running:
        yield running


class Visit(Looked):
    """A diagnosis in the browser."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        super().__init__(browser, path.as_uri(), scheme)
        self.page.wait_for_selector("body[data-ready=yes]", timeout=60_000)

    def pixels(self, color: str) -> int:
        """How many pixels of the timeline have about this colour."""
        return int(self.page.evaluate(
            """(color) => { const c = document.getElementById('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
            const [r, g, b] = JSON.parse(color); let n = 0;
            for (let i = 0; i < d.length; i += 4) if (Math.abs(d[i]-r) + Math.abs(d[i+1]-g) + Math.abs(d[i+2]-b) < 12) n++;
            return n; }""", color))  # fmt: skip


ORANGE = {"light": "[250, 188, 66]", "dark": "[156, 103, 13]"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_verdict_timeline_groups_and_stacks(
    browser: object, tmp_path: Path, scheme: str
) -> None:
    """From a file, with no request to anywhere and no error."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(8, 20)), scheme)
    assert "Rank 1 (node0) never entered all_reduce #20" in visit.page.text_content("#sentence")
    assert "missing rank" in visit.page.text_content(".cards")
    assert "train.py:44 in train" in visit.page.text_content("#stacks")
    assert "default_pg" in visit.page.text_content("#groups")
    assert visit.pixels(ORANGE[scheme]) > 500  # seven open calls reach to the right edge
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
    assert visit.pixels(ORANGE["light"]) == 0
    visit.page.close()


def test_a_click_shows_the_stack_of_a_call(browser: object, tmp_path: Path) -> None:
    """With sizes, state and time."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(2, 4)))
    visit.page.locator("#canvas").scroll_into_view_if_needed()
    box = visit.page.locator("#canvas").bounding_box()
    visit.page.mouse.click(box["x"] + box["width"] - 10, box["y"] + 40)
    detail = visit.page.text_content("#detail")
    assert (
        "all_reduce #4 of default_pg" in detail
        and "not finished" in detail
        and "train.py:44 in train" in detail
    )
    visit.page.close()


def test_the_wheel_scrolls_the_page_and_ctrl_wheel_zooms_the_timeline(browser: Any, tmp_path: Path) -> None:
    """A reader who scrolls past the timeline is not caught in it."""
    visit = Visit(browser, write_page(tmp_path / "page.html", make_traces(64, 20)))
    visit.page.locator("#canvas").scroll_into_view_if_needed()
    box = visit.page.locator("#canvas").bounding_box()
    before = visit.page.evaluate("scrollY")
    visit.page.mouse.move(box["x"] + 300, box["y"] + 60)
    ticks = visit.page.get_attribute("#canvas", "data-ticks")
    visit.page.mouse.wheel(0, 200)
    visit.page.wait_for_function("(old) => scrollY > old", arg=before)
    assert visit.page.get_attribute("#canvas", "data-ticks") == ticks
    visit.page.keyboard.down("Control")
    visit.page.mouse.wheel(0, -400)
    visit.page.keyboard.up("Control")
    visit.page.wait_for_function(
        "(old) => document.getElementById('canvas').dataset.ticks !== old", arg=ticks
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
    assert path.read_text().count("<script") == 8  # one of JSON, six columns, one of ours
    visit = Visit(browser, path)
    assert EVIL in visit.page.text_content("#sentence")
    assert visit.page.title().startswith("Fault found: rank 1")
    assert visit.page.locator("img").count() == 0
    assert visit.errors == []
    visit.page.close()


def test_a_thousand_ranks_with_two_thousand_calls_stay_usable(browser: object, tmp_path: Path) -> None:
    """Two million calls are drawn, searched and moved through without an error."""
    traces = make_traces(1024, 2000, stuck=515)
    visit = Visit(browser, write_page(tmp_path / "page.html", traces))
    assert "Rank 515 (node64) never entered" in visit.page.text_content("#sentence")
    visit.page.click("#all")
    visit.page.fill("#search", "rank 515")
    assert visit.page.text_content("#count") == "1,999 calls"
    visit.page.click("#fault")
    visit.page.locator("#canvas").hover()
    visit.page.keyboard.down("Control")
    visit.page.mouse.wheel(0, -300)
    visit.page.keyboard.up("Control")
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
