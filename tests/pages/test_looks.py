"""Every report in a real browser: phones, laptops, large screens, light and dark, small and large jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.lighthouse.messages import Beat, Hello
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.lighthouse.web import http_protocol
from allranks.model.cluster import Member, PublishedIncident
from pages.gallery import Visit, gallery, hang_incident, running_browser, story_page

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


@pytest.mark.parametrize("replicas", [3, 64, 1024])
def test_the_page_of_a_job_is_as_good_at_every_width(browser: Any, replicas: int) -> None:
    """With members, lost ones and an incident whose story is one click away."""
    with Lighthouse(
        Options(heartbeat_timeout_s=600.0), ServerOptions(job="llama-pretrain-42"), http=http_protocol()
    ) as lighthouse:
        lighthouse.call(lambda service: fill(service, replicas))
        visit = Visit(browser, f"http://{lighthouse.address}/")
        visit.page.wait_for_selector("body[data-ready=yes]")
        visit.page.locator("summary", has_text="Stacks and last calls").press("Enter")
        visit.page.locator(".evidence", has_text="gallery.py:40 in load_batch").wait_for()
        assert "all_reduce #59" in visit.page.inner_text(".evidence .guilty")
        visit.page.locator(
            "#sentence", has_text=f"{replicas - 1} of {replicas} replicas, replica-1 lost"
        ).wait_for()
        flaws = visit.flaws_everywhere(f"job-{replicas}")
        assert "lost" in visit.page.inner_text("#rows tr:first-child")
        visit.page.click("text=Open the story")
        visit.page.wait_for_selector("#guilty")
        assert visit.errors == []
        assert all(url.startswith(f"http://{lighthouse.address}/") for url in visit.requests)
        visit.page.close()
    assert flaws == []


def test_the_first_line_does_not_outlive_the_lighthouse(browser: Any) -> None:
    """What it said may no longer be true: amber, and how old it is."""
    with Lighthouse(
        Options(heartbeat_timeout_s=600.0), ServerOptions(job="llama"), http=http_protocol()
    ) as lighthouse:
        lighthouse.call(lambda service: fill(service, 3))
        visit = Visit(browser, f"http://{lighthouse.address}/")
        visit.page.locator("#live", has_text="live").wait_for()
        assert visit.page.inner_text("#sentence").startswith("Training: step 1,652")
    visit.page.locator("#sentence", has_text="No news from the lighthouse for").wait_for()
    assert "Last known: Training: step 1,652" in visit.page.inner_text("#sentence")
    assert visit.page.get_attribute("#now", "class") == "now warn"
    visit.page.close()


def test_the_membership_strip_has_a_gap_from_the_loss_to_the_return(browser: Any) -> None:
    """Also for one that was evicted and readmitted before its process was back."""
    with Lighthouse(
        Options(heartbeat_timeout_s=600.0), ServerOptions(job="x"), http=http_protocol()
    ) as lighthouse:
        lighthouse.call(lambda service: fill(service, 3))
        log = ("evicted", "returned", "lost", "let_in")
        for kind in log:
            lighthouse.call(lambda service, kind=kind: service.event_log.event(kind, kind, "replica-1"))
        visit = Visit(browser, f"http://{lighthouse.address}/")
        strip = "() => document.getElementById('members').dataset.spans"
        visit.page.wait_for_function(strip)
        lighthouse.call(lambda service: service.event_log.event("connected", "back", "replica-1"))
        visit.page.wait_for_function(f"() => JSON.parse(({strip})())['replica-1'].length == 2")
        spans = json.loads(visit.page.evaluate(strip))
        assert len(spans["replica-0"]) == 1 and spans["replica-1"][0][1] < spans["replica-1"][1][0]
        visit.page.close()


def test_the_page_of_a_script_without_step_marks_shows_no_empty_parts(browser: Any) -> None:
    """The open incident comes first; nothing about steps, no column without content."""
    with Lighthouse(
        Options(heartbeat_timeout_s=600.0), ServerOptions(job="hf-finetune"), http=http_protocol()
    ) as lighthouse:
        lighthouse.call(lambda service: fill_without_steps(service, 2))
        visit = Visit(browser, f"http://{lighthouse.address}/")
        visit.page.locator("#sentence", has_text="Running: 240 calls finished, 2 nodes").wait_for()
        assert not visit.page.is_visible("#pace-part") and not visit.page.is_visible("#members-part")
        facts = visit.page.locator("#cards .fact span").all_inner_texts()
        assert facts == ["Nodes", "Without a call", "Incidents", "Up"]
        heads = visit.page.locator("#replicas th:visible").all_inner_texts()
        assert heads == ["Node", "State", "Last heard", "Note"]
        parts = "() => [...document.querySelectorAll('main > *, body > *')].map((one) => one.id)"
        order = [one for one in visit.page.evaluate(parts) if one]
        assert order.index("incident-part") < order.index("waits-part")
        flaws = visit.flaws_everywhere("job-plain")
        assert visit.errors == []
        visit.page.close()
    assert flaws == []


class Silent:
    """A replica that is only there."""

    address = "10.0.0.1:1"

    def deliver(self, message: object, frame: bytes) -> None:
        """Takes it."""

    def close(self) -> None:
        """Goes."""


def fill_without_steps(service: Service, nodes: int) -> None:
    """A whole job of any script: agents, calls, an open incident."""
    for i in range(nodes):
        hello = Hello(replica=f"agent-{i}", session=f"a{i}", node=f"gpu-node-{i:03d}", role="observer")
        found = service.hello(Silent(), hello)
        assert isinstance(found, Session)
        for calls in (0, 60, 120):
            service.beat(found, Beat(step=-1, progress=calls, health="rank 0 waits for rank 1" if i else ""))
    service.agents.report_incident(
        PublishedIncident(
            "20260301-030000-hang",
            "Rank 1 (node0) never entered all_reduce #60 of group default_pg; it is at gallery.py:40 in load_batch",
            node="gpu-node-000",
            cause="stuck_before_collective",
            at=1.7e9,
            kind="hang",
        )
    )


def fill(service: Service, replicas: int, incident_at: float = 1.7e9) -> None:
    """A job in which one replica is lost and the others train."""
    for i in range(replicas):
        found = service.hello(
            Silent(), Hello(replica=f"replica-{i}", session=f"s{i}", node=f"gpu-node-{i // 8:03d}")
        )
        assert isinstance(found, Session)
        service.beat(found, Beat(step=1650 + i % 3, progress=1650))
        service.join(found, Member(replica=f"replica-{i}", step=1650))
    service.accuse("replica-1", "process 4711 exited")
    sentence = "Rank 1 (node0) never entered all_reduce #60 of group default_pg; it is at gallery.py:40 in load_batch"
    _, evidence = hang_incident(3)
    service.agents.report_incident(
        PublishedIncident(
            "20260301-030000-hang",
            sentence,
            replicas=("replica-1",),
            node="gpu-node-000",
            path="/var/tmp/x",
            cause="stuck_before_collective",
            at=incident_at,
            kind="hang",
            outcome="replica-1 was evicted",
            closed=True,
            story=story_page(3),
            evidence=json.dumps({"ranks": [one.to_dict() for one in evidence]}),
        )
    )
