"""The page, the API, metrics and events, over real sockets and in a real browser."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.messages import Hello
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.service import Service
from allranks.model.cluster import Member, PublishedIncident, RestartWanted
from pages.jobs import whole_job

TOKEN = "right-token"


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    """A lighthouse with its page, on a free port."""
    options = Options(heartbeat_timeout_s=60.0)
    with Lighthouse(options, ServerOptions(token=TOKEN)) as running:
        yield running


@pytest.fixture
def replica(lighthouse: Lighthouse) -> Iterator[Client]:
    """One member with a name that must be escaped."""
    client = Client(
        ClientOptions(addresses=(lighthouse.address,), token=TOKEN, replica="r<b>&1", node="n1", beacon=False)
    ).start(30)
    client.join(Member(replica="r<b>&1", step=12), timeout_s=30)
    yield client
    client.close()


def get(lighthouse: Lighthouse, path: str) -> tuple[int, str, bytes]:
    """Status, content type, body."""
    connection = http.client.HTTPConnection(lighthouse.address, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.headers["Content-Type"], answer.read()
    connection.close()
    return found


def post(
    lighthouse: Lighthouse, path: str, body: Any = None, token: str = TOKEN
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an action."""
    connection = http.client.HTTPConnection(lighthouse.address, timeout=20)
    connection.request("POST", path, json.dumps(body or {}), {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_status_metrics_health_and_description_are_served(lighthouse: Lighthouse, replica: Client) -> None:
    """On the same port as the frames of replicas."""
    code, kind, body = get(lighthouse, "/api/status")
    status = json.loads(body)
    assert (code, kind) == (200, "application/json")
    assert status["number"] == 1 and status["replicas"][0]["replica"] == "r<b>&1"
    code, kind, body = get(lighthouse, "/metrics")
    assert code == 200 and kind.startswith("text/plain")
    assert "allranks_quorum_members 1" in body.decode()
    assert 'allranks_events_total{kind="quorum"} 1' in body.decode()
    assert 'allranks_replica_step{replica="r<b>&1"}' in body.decode()
    assert json.loads(get(lighthouse, "/healthz")[2]) == {"ok": True, "leading": True}
    description = json.loads(get(lighthouse, "/openapi.json")[2])
    for path, methods in description["paths"].items():
        for method in methods:
            if method == "get" and path != "/api/events" and "{" not in path:
                assert get(lighthouse, path)[0] == 200, path
    assert get(lighthouse, "/nowhere")[0] == 404
    assert b"r&lt;b&gt;&amp;1" in get(lighthouse, "/status")[2]


def test_actions_need_the_token(lighthouse: Lighthouse, replica: Client) -> None:
    """Wrong or no token: nothing happens. Right token: evicted, then let in."""
    path = "/api/replicas/r%3Cb%3E%261/evict"
    assert post(lighthouse, path, token="wrong")[0] == 401
    assert post(lighthouse, path, token="")[0] == 401
    assert lighthouse.status().evicted == {}
    assert post(lighthouse, path, {"reason": "too slow"}) == (200, {"evicted": "r<b>&1"})
    assert lighthouse.status().evicted == {"r<b>&1": "too slow"}
    assert post(lighthouse, "/api/replicas/r%3Cb%3E%261/readmit") == (200, {"readmit": True})
    assert post(lighthouse, "/api/replicas/nobody/evict")[0] == 404
    code, answer = post(lighthouse, "/api/collect", {"reason": "look"})
    assert code == 200 and answer["incident"]


def test_events_push_every_change_to_listeners(lighthouse: Lighthouse, replica: Client) -> None:
    """The first event is the whole view; an eviction arrives without asking again."""
    with urllib.request.urlopen(f"http://{lighthouse.address}/api/events", timeout=30) as stream:
        first = json.loads(stream.readline().removeprefix(b"data: "))
        assert first["odd"] == [] and first["replicas"] == {"member": 1}
        post(lighthouse, "/api/replicas/r%3Cb%3E%261/evict", {"reason": "x"})
        for line in stream:
            if line.startswith(b"data: ") and json.loads(line[6:])["odd"]:
                break
        else:
            pytest.fail("the eviction was never pushed")


def test_the_head_of_the_events_has_no_body(lighthouse: Lighthouse) -> None:
    """What follows a HEAD would be taken for the next answer."""
    host, port = lighthouse.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"HEAD /api/events HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = b""
        while not received.partition(b"\r\n\r\n")[2] and (chunk := connection.recv(4000)):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in head and body == b""


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"GET / HTTP/9\r\n\r\n", b" 400 "),
        (b"GET  /\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b" 400 "),
        (b"POST /x HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", b" 413 "),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b" 400 "),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", b" 431 "),
        (b"PUT / HTTP/1.1\r\n\r\n", b" 405 "),
        (b"POST /x HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n", b" 400 "),
        (b"POST /x HTTP/1.1\r\nContent-Length : 0\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: a.example\r\n\r\n", b" 400 "),
    ],
)
def test_bad_requests_are_refused_and_the_service_lives(
    lighthouse: Lighthouse, raw: bytes, expected: bytes
) -> None:
    """Each gets its answer; the next request is served."""
    host, port = lighthouse.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw)
        assert expected in connection.recv(200)
    assert get(lighthouse, "/healthz")[0] == 200


def test_a_request_in_pieces_and_several_in_one_piece_are_served(lighthouse: Lighthouse) -> None:
    """Keep-alive and slow senders."""
    host, port = lighthouse.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for piece in (b"GET /hea", b"lthz HTTP/1.1\r\nHost", b": x\r\n", b"\r\n"):
            connection.sendall(piece)
        assert b'"ok":true' in connection.recv(2000)
        connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = b""
        while chunk := connection.recv(4000):
            received += chunk
        assert received.count(b'"ok":true') == 2


def test_the_page_is_live_and_escapes_in_a_real_browser(
    lighthouse: Lighthouse, replica: Client, tmp_path: Path
) -> None:
    """Quorum with its reason, the replica, an incident and an eviction appear; nothing is injected, no error logged;
    a thousand replicas are shown, found and acted on."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("chromium is not installed (Debian: chromium)")
    errors: list[str] = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(f"http://{lighthouse.address}/")
        page.wait_for_selector("#live.good")
        page.click("#who")
        page.locator("#rows td", has_text="r<b>&1").first.wait_for()
        page.locator("#sentence", has_text="step 12, 1 of 1 replicas").wait_for()
        lighthouse.call(
            lambda service: service.agents.report_incident(
                PublishedIncident("i1", "rank 5 <script>alert(1)</script> is stuck")
            )
        )
        page.wait_for_selector(".incident")
        assert "<script>alert(1)</script> is stuck" in page.inner_text("#incidents")
        lighthouse.call(_a_thousand_replicas)
        page.locator("#who", has_text="1,000 connected").wait_for()
        page.click("#act")
        page.fill("#token", TOKEN)
        page.select_option("#replica", label="r0999")
        page.click("#do")
        page.locator("#odd", has_text="r0999: evicted").wait_for()
        page.click("#act")
        page.select_option("#replica", label="r<b>&1")
        page.click("#do")
        page.locator("#odd", has_text="r<b>&1: evicted").wait_for()
        page.screenshot(path=str(tmp_path / "page.png"))
        browser.close()
    assert set(lighthouse.status().evicted) == {"r<b>&1", "r0999"}
    assert errors == []


def test_the_parts_of_the_page_are_served(lighthouse: Lighthouse) -> None:
    """The history, the layout, one rank with its evidence; what is not known is not invented."""
    lighthouse.call(lambda service: whole_job(service, 16, "hung"))
    view = json.loads(get(lighthouse, "/api/page")[2])
    assert view["line"]["level"] == "bad" and view["cells"] == "wswwwwwwwwwwwwww" and view["guilty"] == [1]
    past = json.loads(get(lighthouse, "/api/history?span=60")[2])
    assert 55 <= len(past["at"]) <= 62 and past["steps_per_s"][5] == 0.0 and past["step_p50_s"][5] is None
    day = json.loads(get(lighthouse, "/api/history?span=86400")[2])["at"]
    assert 14 < len(day) < 100  # one row a minute, then one in 10 s, then one a second
    assert get(lighthouse, "/api/history?span=long")[0] == 400
    nodes = json.loads(get(lighthouse, "/api/nodes")[2])
    assert [len(one["ranks"]) for one in nodes["nodes"]] == [8, 8] and nodes["groups"]["tp_0"][:2] == [0, 1]
    rank = json.loads(get(lighthouse, "/api/ranks/1")[2])
    assert rank["pid"] == 4001 and rank["doing"] == "blocked" and rank["gpus"][0]["index"] == 1
    assert rank["evidence"]["where"] == "gallery.py:40 in load_batch" and rank["evidence"]["source"]["lines"]
    assert get(lighthouse, "/api/ranks/77")[0] == 404 and get(lighthouse, "/api/ranks/..")[0] == 404


def test_a_whole_job_is_restarted_by_its_agents(lighthouse: Lighthouse) -> None:
    """With the token only; a job of replicas is not."""
    assert post(lighthouse, "/api/restart")[0] == 409
    agent = Client(
        ClientOptions(
            (lighthouse.address,), TOKEN, role="observer", replica="agent-n1", node="n1", beacon=False
        )
    ).start(30)
    told: queue.Queue[object] = queue.Queue()
    agent.subscribe(told.put)
    try:
        assert post(lighthouse, "/api/restart", token="wrong")[0] == 401
        assert post(lighthouse, "/api/restart", {"reason": "by hand"}) == (200, {"restart": True})
        assert told.get(timeout=20) == RestartWanted("by hand")
    finally:
        agent.close()


@pytest.fixture
def slow_heartbeats() -> Iterator[Lighthouse]:
    """A lighthouse to which members send a heartbeat every 25 s."""
    options = Options(heartbeat_timeout_s=60.0, heartbeat_s=25.0)
    with Lighthouse(options, ServerOptions(token=TOKEN)) as running:
        yield running


def test_the_page_hears_of_a_suspicion_at_once(slow_heartbeats: Lighthouse) -> None:
    """Not with the next heartbeat, and not with the next refresh."""
    address = slow_heartbeats.address
    agent = Client(
        ClientOptions((address,), TOKEN, role="observer", replica="agent-n1", node="n1", beacon=False)
    ).start(30)
    agent.report(5, 5)
    try:
        with urllib.request.urlopen(f"http://{address}/api/events", timeout=20) as stream:
            assert json.loads(stream.readline().removeprefix(b"data: "))["line"]["state"] != "looking"
            agent.report(5, 5, "stalled: rank 0 waits for rank 1")
            for line in stream:
                if line.startswith(b"data: ") and json.loads(line[6:])["line"]["state"] == "looking":
                    break
    finally:
        agent.close()


def test_the_page_of_an_incident_is_served_in_a_sandbox(lighthouse: Lighthouse) -> None:
    """Time, outcome and a link stand in the status; the page itself is sent only when asked for."""
    found = PublishedIncident(
        "20260301-030000",
        "rank 5 is stuck",
        kind="hang",
        at=5.0,
        outcome="evicted",
        story="<p>the story</p>",
        evidence='{"ranks": []}',
    )
    lighthouse.call(lambda service: service.agents.report_incident(found))
    (shown,) = json.loads(get(lighthouse, "/api/status")[2])["incidents"]
    assert (shown["story"], shown["at"], shown["outcome"]) == ("/incidents/20260301-030000", 5.0, "evicted")
    lighthouse.call(lambda service: service.agents.report_incident(replace(found, closed=True, story="")))
    (shown,) = json.loads(get(lighthouse, "/api/status")[2])["incidents"]
    assert shown["closed"] and shown["story"]
    with urllib.request.urlopen(f"http://{lighthouse.address}{shown['story']}", timeout=20) as answer:
        assert answer.read() == b"<p>the story</p>"
        assert any("sandbox" in value for value in answer.headers.get_all("Content-Security-Policy"))
    assert json.loads(get(lighthouse, shown["evidence"])[2]) == {"ranks": []}
    assert get(lighthouse, "/incidents/other/evidence")[0] == 404
    assert get(lighthouse, "/incidents/../../etc/passwd")[0] == 404


def test_agents_are_not_counted_as_replicas(lighthouse: Lighthouse, replica: Client) -> None:
    """Neither by state nor with a step of -1; incidents, speed and stalls are measured."""
    options = ClientOptions(
        (lighthouse.address,), TOKEN, role="observer", replica="agent-n1", node="n1", beacon=False
    )
    agent = Client(options).start(30)
    try:
        text = get(lighthouse, "/metrics")[2].decode()
    finally:
        agent.close()
    assert "observer" not in text and 'replica="agent-n1"' not in text
    assert "allranks_agents 1" in text and 'allranks_replicas{state="member"} 1' in text
    for name in ("allranks_steps_per_second", "allranks_stalled_seconds", "allranks_incidents_open"):
        assert f"\n{name} " in text


class Quiet:
    """A replica that is only there."""

    address = "10.0.0.1:1"

    def deliver(self, message: object, frame: bytes) -> None:
        """Says nothing."""

    def close(self) -> None:
        """Goes."""


def _a_thousand_replicas(service: Service) -> None:
    for i in range(1000):
        service.hello(Quiet(), Hello(replica=f"r{i:04d}", session=f"s{i}", node=f"host-{i // 8}"))
