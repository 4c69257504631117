"""Every report in a real browser: phones, laptops, large screens, light and dark, small and large jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.service import Service
from pages.gallery import Visit, gallery, running_browser
from pages.jobs import replica_job, whole_job

pytestmark = pytest.mark.everything


@pytest.fixture(scope="module")
def browser(keep_child: set[int]) -> Iterator[Any]:
    """One browser for all pages."""
    with running_browser(keep_child) as running:
        yield running


@pytest.mark.parametrize("ranks", [3, 64, 1024])
def test_no_report_overflows_cuts_words_or_is_too_faint(browser: Any, tmp_path: Path, ranks: int) -> None:
    """At 400, 1,000 and 1,600 px, light and dark, without a request to elsewhere."""
    flaws = []
    for path in gallery(tmp_path, (ranks,)):
        visit = Visit(browser, path.as_uri())
        flaws += visit.flaws_everywhere(path.stem)
        assert visit.errors == []
        assert visit.requests == [path.as_uri()]
        visit.page.close()
    assert flaws == []


def test_every_report_can_be_printed(browser: Any, tmp_path: Path) -> None:
    """On white paper, in full contrast, without buttons, and nothing is cut off at the right."""
    for path in gallery(tmp_path, (3,)):
        visit = Visit(browser, path.as_uri(), "dark", 794)  # A4 at 96 dpi
        visit.page.emulate_media(media="print")
        flaws = visit.flaws(794, "dark")
        assert flaws == [], path.stem
        assert (
            visit.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--back')")
            == "#fff"
        )
        assert not any(button.is_visible() for button in visit.page.query_selector_all("button, input"))
        assert visit.page.pdf(format="A4").startswith(b"%PDF")
        visit.page.close()


def test_every_report_says_job_host_date_and_version_and_can_be_copied_from(
    browser: Any, tmp_path: Path
) -> None:
    """The answer first, then what it is about; the code line of the guilty rank stands beside its stack."""
    for path in gallery(tmp_path, (3,)):
        visit = Visit(browser, path.as_uri())
        about = visit.page.inner_text("#about")
        assert (
            "llama-pretrain-42" in about
            and "node0" in about
            and "2023-11-14" in about
            and "allranks 0." in about
        )
        assert visit.page.inner_text("#guilty .pill").lower() == "live stack"
        assert "gallery.py:40" in visit.page.inner_text("#guilty .source figcaption")
        assert visit.page.locator("#guilty .source .hit").count() == 1
        assert "gallery.py:40" in visit.page.inner_text("#todo")
        visit.page.close()


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    """One whose replicas never fall silent."""
    server = ServerOptions(job="llama-pretrain-42", token="t")
    with Lighthouse(Options(heartbeat_timeout_s=600.0), server) as running:
        yield running


def visit_job(browser: Any, lighthouse: Lighthouse) -> Visit:
    visit = Visit(browser, f"http://{lighthouse.address}/")
    visit.page.wait_for_selector("body[data-ready=yes]")
    return visit


#: How many pixels of the grid of ranks have a colour.
PIXELS = """(name) => {
  const grid = document.querySelector("#grid"), pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name); pen.fillRect(0, 0, 1, 1);
  const want = pen.getImageData(0, 0, 1, 1).data.join(), all = grid.getContext("2d").getImageData(0, 0, grid.width, grid.height).data;
  let count = 0;
  for (let i = 0; i < all.length; i += 4) count += all.slice(i, i + 4).join() === want;
  return count;
}"""


@pytest.mark.parametrize("state", ["healthy", "looking", "hung", "recovered"])
@pytest.mark.parametrize("ranks", [3, 64, 1024, 16384])
def test_the_page_of_a_job_is_as_good_at_every_width(
    browser: Any, lighthouse: Lighthouse, ranks: int, state: str
) -> None:
    """Nothing overlaps, the answer is whole, and nothing is asked of another host."""
    lighthouse.call(lambda service: whole_job(service, ranks, state))
    visit = visit_job(browser, lighthouse)
    visit.page.wait_for_selector("#charts .uplot")
    line, level = visit.page.locator("#sentence"), visit.page.get_attribute("#now", "class")
    if state == "hung":
        assert "it sleeps at gallery.py:40 in load_batch. Nothing was done" in line.inner_text()
        visit.page.locator(".evidence .source .hit").first.wait_for()
        assert "What to do: inspect gallery.py:40" in visit.page.inner_text("#incidents")
        frame = visit.page.frame_locator("iframe.timeline")
        visit.page.locator("iframe.timeline").scroll_into_view_if_needed()
        frame.locator("#legend i").first.wait_for()
        assert not frame.locator("header").is_visible()
        frame.locator("body[data-ready=yes]").wait_for()
        if ranks == 3:  # there were 200 px of nothing below them
            visit.page.wait_for_function("document.querySelector('iframe.timeline').offsetHeight < 400")
    assert level == {"hung": "now bad", "looking": "now warn"}.get(state, "now good")
    if state == "looking":  # one rank that sleeps among thousands was a dot of three pixels
        assert visit.page.evaluate(PIXELS, "--cell-s") >= 64
    shown = visit.page.evaluate("Charts.shown().map((p) => p.title)")
    assert shown == ["Step time", "Steps per second", "Loss", "Alive"]
    flaws = visit.flaws_everywhere(f"job-{ranks}-{state}")
    box = line.bounding_box()
    assert box is not None and line.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1")
    assert visit.errors == []
    assert all(url.startswith(f"http://{lighthouse.address}/") for url in visit.requests)
    visit.page.close()
    assert flaws == []


def test_the_page_of_replicas_names_those_that_are_not_well(browser: Any, lighthouse: Lighthouse) -> None:
    """A summary, and the table on demand, in natural order."""
    lighthouse.call(lambda service: replica_job(service, 64))
    visit = visit_job(browser, lighthouse)
    visit.page.locator("#sentence", has_text="63 of 64 replicas, replica-1 lost").wait_for()
    assert visit.page.inner_text("#who") == "Replicas: 63 members, 1 lost"
    assert "replica-1: lost since" in visit.page.inner_text("#odd")
    visit.page.click("#who")
    visit.page.locator("#rows tr").nth(63).wait_for()
    listed = visit.page.locator("#rows tr td:first-child").all_inner_texts()
    assert listed[:4] == ["replica-1", "replica-0", "replica-2", "replica-3"]
    flaws = visit.flaws_everywhere("job-replicas")
    visit.page.close()
    assert flaws == []


def test_a_cell_opens_the_drawer_of_its_rank(browser: Any, lighthouse: Lighthouse) -> None:
    """Stack beside source, last calls, memory, GPU."""
    lighthouse.call(lambda service: whole_job(service, 16, "hung"))
    visit = visit_job(browser, lighthouse)
    visit.page.wait_for_function("() => Ranks.placeOf(1)")
    x, y = visit.page.evaluate("Ranks.placeOf(1)")
    visit.page.locator("#grid").click(position={"x": x + 4, "y": y + 4})
    drawer = visit.page.locator("#drawer")
    drawer.locator("text=4001").first.wait_for()
    words = drawer.inner_text()
    assert "sleeps" in words and "14.2 GB" in words and "64 °C" in words and "all_reduce #59" in words
    assert drawer.locator(".source .hit").count() == 1
    visit.page.keyboard.press("Escape")
    assert not drawer.is_visible()
    visit.page.close()


def test_a_job_of_several_worlds_is_shown_by_role_and_number(browser: Any, lighthouse: Lighthouse) -> None:
    """One block for each role, and no bare rank in the tip or the drawer."""

    def two_worlds(service: Service) -> None:
        whole_job(service, 6)
        table = service.agents.ranks
        names = tuple(f"{role} {n}" for role, count in (("trainer", 4), ("rollout", 2)) for n in range(count))
        table.note(replace(table.reports["agent-0"], names=names), service.now())

    lighthouse.call(two_worlds)
    visit = visit_job(browser, lighthouse)
    visit.page.wait_for_function("() => Ranks.placeOf(4) && Ranks.name(4) === 'rollout 0'")
    trainer, rollout = (visit.page.evaluate(f"Ranks.placeOf({rank})") for rank in (3, 4))
    assert rollout[0] == 0 and rollout[1] > trainer[1]
    assert visit.page.locator("#by option").first.inner_text() == "by role"
    visit.page.locator("#grid").hover(position={"x": rollout[0] + 4, "y": rollout[1] + 4})
    assert visit.page.inner_text("#cell-tip").startswith("rollout 0: ")
    visit.page.locator("#grid").click(position={"x": rollout[0] + 4, "y": rollout[1] + 4})
    assert visit.page.locator("#drawer h2").inner_text() == "rollout 0"
    visit.page.close()


def test_an_action_asks_for_the_token_and_says_where_it_is(browser: Any, lighthouse: Lighthouse) -> None:
    """A wrong one changes nothing; the right one asks the agents."""
    lighthouse.call(lambda service: whole_job(service, 8))
    visit = visit_job(browser, lighthouse)
    visit.page.click("#stacks")
    assert "/dev/shm/allranks-1000/llama-pretrain-42/token on gpu-node-000" in visit.page.inner_text(
        "#token-place"
    )
    visit.page.fill("#token", "wrong")
    visit.page.click("#do")
    visit.page.locator("#said", has_text="this needs the job token; it is in /dev/shm").wait_for()
    visit.page.fill("#token", "t")
    visit.page.click("#do")
    visit.page.locator("#live", has_text="collecting stacks").wait_for()
    assert lighthouse.call(lambda service: service.event_log.counts["collect"]) == 1
    visit.page.close()


def test_zoom_range_and_hover_belong_to_all_charts(browser: Any, lighthouse: Lighthouse) -> None:
    """One time axis: what is dragged on one chart holds for all."""
    lighthouse.call(lambda service: whole_job(service, 8, "recovered"))
    visit = visit_job(browser, lighthouse)
    box = visit.page.locator(".u-over").first.bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + 100, box["y"] + 30)
    heads = visit.page.locator(".chart-head .soft").all_inner_texts()
    assert all("·" in head and ":" in head for head in heads) and len({head[:8] for head in heads}) == 1
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 200, box["y"] + 30)
    visit.page.mouse.up()
    visit.page.locator("#zoom").wait_for()
    visit.page.click("#unzoom")
    assert not visit.page.is_visible("#zoom")
    visit.page.click("text=3 h")
    visit.page.wait_for_function("() => Charts.shown().length && Charts.shown()[0].at.length < 120")
    visit.page.close()


def test_the_first_line_does_not_outlive_the_lighthouse(browser: Any) -> None:
    """What it said may no longer be true: amber, and how old it is."""
    with Lighthouse(Options(), ServerOptions(job="llama")) as lighthouse:
        lighthouse.call(lambda service: whole_job(service, 3))
        visit = visit_job(browser, lighthouse)
        assert visit.page.inner_text("#sentence").startswith("Training: step 1,652")
    visit.page.locator("#sentence", has_text="No news from the lighthouse for").wait_for()
    assert "Last known: Training: step 1,652" in visit.page.inner_text("#sentence")
    assert visit.page.get_attribute("#now", "class") == "now warn"
    visit.page.close()


def test_a_script_without_step_marks_gets_the_same_page(browser: Any, lighthouse: Lighthouse) -> None:
    """Calls per second, the grid of ranks, incidents."""
    lighthouse.call(lambda service: whole_job(service, 16, "hung", steps=False))
    visit = visit_job(browser, lighthouse)
    visit.page.wait_for_selector("#charts .uplot")
    assert visit.page.evaluate("Charts.shown().map((p) => p.title)") == ["Calls per second", "Alive"]
    top = visit.page.evaluate("Charts.shown()[0].top")
    assert 1234 <= top < 1600  # the axis is not wrong by ten
    assert "15 in a call" in visit.page.inner_text("#cell-legend")
    flaws = visit.flaws_everywhere("job-plain")
    assert visit.errors == []
    visit.page.close()
    assert flaws == []


def test_other_jobs_take_one_line(browser: Any, lighthouse: Lighthouse, tmp_path: Path) -> None:
    """Five of them took two lines of the head; now their number does, and a click lists them, the worst first."""
    visit = visit_job(browser, lighthouse)
    found = [
        {"job": f"pretrain-{n}-1119-201221", "address": f"127.0.0.1:{4000 + n}", "at": 0, "level": "bad" if n == 4 else "good",
         "text": "Training", "ended": False, "here": False}
        for n in range(5)
    ]  # fmt: skip
    visit.page.route("**/api/jobs", lambda route: route.fulfill(json=found))
    visit.page.reload()
    visit.page.set_viewport_size({"width": 400, "height": 900})
    head = visit.page.locator("#jobs summary")
    assert head.inner_text() == "5 other jobs"
    assert head.bounding_box()["height"] < 30
    head.click()
    assert visit.page.locator("#jobs a").all_inner_texts()[0] == "pretrain-4-1119-201221"
    flaws = visit.flaws_everywhere("job-others")
    visit.page.close()
    assert flaws == []
