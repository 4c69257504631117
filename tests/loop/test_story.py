"""The incident page, webhooks and folder."""

from __future__ import annotations

import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from allranks.incidents.folder import copy_boxes, new_id, open_incident, read_incidents
from allranks.incidents.publish import deliver, payload
from allranks.model.diagnosis import Action, Finding, Incident, Moment
from allranks.report.story import headline, render_story

VERDICT = Finding(
    "stuck_before_collective",
    (5,),
    "rank 5 never entered all_reduce #7",
    confidence=0.95,
    where="data.py:88 in load",
)


def incident(**facts: object) -> Incident:
    """A finished incident."""
    base: dict[str, object] = {
        "id": "20260101-030000", "kind": "hang", "job": "job", "opened": 1.7e9, "reason": "silent", "node": "n1", "ranks": (5,),
        "verdict": VERDICT, "action": Action("evict", "stuck", (5,), 2, done=True, result="replica-2 was evicted"),
        "timeline": (Moment("last good step", 1.7e9), Moment("noticed", 1.7e9 + 12, "silent"), Moment("recovered", 1.7e9 + 20)),
        "stacks": {"ranks": {"0": {"cause": "collective_wait", "where": "t.py:1", "evidence": "e"}, "5": {"cause": "sleep"}}},
        "durations_s": {"noticed": 12.0, "recovered": 0.2}, "folder": "/x/y",
    }  # fmt: skip
    return Incident(**{**base, **facts})  # type: ignore[arg-type]


def test_the_page_begins_with_the_sentence_and_holds_the_whole_story() -> None:
    """Verdict, cards, timeline, action and ranks; the guilty rank first."""
    page = render_story(incident(closed=1.7e9 + 20), ("line one",))
    assert ">Rank 5 never entered all_reduce #7</h1>" in page
    for text in (
        "Recovered",
        "+12.0 s",
        "Others continued after",
        "20 s",
        "replica-2 was evicted",
        "line one",
        "allranks diagnose /x/y",
    ):
        assert text in page
    assert page.index("Rank 5: sleep") < page.index("Rank 0: collective wait at t.py:1")


def test_hostile_text_cannot_inject_anything() -> None:
    """Stacks and names come from outside."""
    evil = "<script>alert(1)</script>\"'"
    page = render_story(incident(id=evil, job=evil, node=evil, reason=evil, verdict=Finding("", (), evil, where=evil), missing=(evil,), stacks={"ranks": {"0": {"cause": evil}}}), (evil,))  # fmt: skip
    assert page.count("<script") == 1  # ours, allowed by its hash
    assert "src=" not in page and "alert(1)</script>" not in page


def test_an_incident_without_a_verdict_tells_its_reason() -> None:
    """Nothing is invented."""
    assert headline(incident(verdict=None)) == "Silent"


def test_ids_never_clash_and_the_file_is_always_whole(tmp_path: Path) -> None:
    """Two incidents within one second; updates are atomic."""
    first = open_incident(tmp_path, kind="hang", job="j", reason="a")
    second = open_incident(tmp_path, kind="hang", job="j", reason="b")
    assert first.path != second.path
    first.update(Moment("noticed", 2.0), Moment("overdue", 1.0), ranks=(4,))
    found = read_incidents(tmp_path)
    assert [m["name"] for m in found[0]["timeline"]] == ["overdue", "noticed"]
    (second.path / "incident.json").write_text("{ broken")
    assert len(read_incidents(tmp_path)) == 1


def test_an_incident_is_never_written_into_the_folder_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many names of this second are taken."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    stem = new_id(1.7e9)
    taken = {stem, *(f"{stem}-{number}" for number in range(1, 1000))}
    for name in taken:
        (tmp_path / name).mkdir()
    opened = open_incident(tmp_path, kind="hang", job="j", reason="a")
    assert [path.parent for path in tmp_path.glob("*/incident.json")] == [opened.path]
    assert opened.path.name.startswith(stem) and opened.path.name not in taken


def test_a_box_that_cannot_be_copied_is_said(tmp_path: Path) -> None:
    """Evidence that is missing is named."""
    opened = open_incident(tmp_path, kind="hang", job="j", reason="a")
    (tmp_path / "good.box").write_bytes(b"x")
    missing = copy_boxes([tmp_path / "good.box", tmp_path / "gone.box"], opened.path / "boxes")
    assert [c.name for c in (opened.path / "boxes").iterdir()] == ["good.box"]
    assert missing == ["black box gone.box: No such file or directory"]


def test_slack_gets_its_own_shape() -> None:
    """Text with the sentence, the action and the folder."""
    url, body = payload("slack:http://x/y", incident(), "rank 5 is stuck")
    assert url == "http://x/y"
    assert set(body) == {"text"}
    assert "rank 5 is stuck" in str(body["text"]) and "evict" in str(body["text"])


def test_webhooks_are_posted_retried_and_never_raise() -> None:
    """A real server that fails once; a dead address beside it."""
    seen: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            self.send_response(500 if len(seen) == 1 else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        good = f"http://127.0.0.1:{server.server_port}/hook"
        wanted = {good: True, "http://127.0.0.1:1/": False, "no url": False}
        assert {address: deliver(address, incident(), "s", attempts=2) for address in wanted} == wanted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(seen) == 2
    assert seen[1]["incident"]["id"] == "20260101-030000"  # type: ignore[index]


@pytest.mark.everything
def test_the_page_opens_in_a_real_browser_without_network_or_errors(tmp_path: Path) -> None:
    """From file://, with no request beside itself and no error in the console."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("chromium is not installed (Debian: chromium)")
    page_file = tmp_path / "story.html"
    page_file.write_text(render_story(incident(), ("line",)))
    requests: list[str] = []
    errors: list[str] = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(page_file.as_uri())
        assert page.inner_text("h1") == "Rank 5 never entered all_reduce #7"
        assert page.locator(".strip .dot").count() == 3
        browser.close()
    assert requests == [page_file.as_uri()]
    assert errors == []
