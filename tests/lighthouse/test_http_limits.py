"""What an unknown client's browser, or worse, may cost the lighthouse: memory, names, turns."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from allranks.lighthouse import web
from allranks.lighthouse.http import (
    ALL_UNREAD_BYTES,
    MAX_LINES,
    Answer,
    EventStream,
    HttpConnection,
    HttpRequest,
    HttpSlots,
    _is_private,
    _parse_head,
)
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.page import take_snapshot
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.service import Service
from allranks.lighthouse.status import Status
from allranks.lighthouse.web import MAX_CONNECTIONS, Web

from .processes import LighthouseProcess

RunLighthouse = Callable[..., LighthouseProcess]


def dial(address: str, receive_bytes: int = 0) -> socket.socket:
    host, port = address.rsplit(":", 1)
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(20)
    sock.connect((host, int(port)))
    return sock


def peak_mb(pid: int) -> int:
    """The most memory that the process ever held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def ask(address: str, path: str = "/healthz", **headers: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("path", ["/", "/api/status"])
def test_pipelined_requests_whose_answers_are_not_read_cost_no_memory(
    run_lighthouse: RunLighthouse, path: str
) -> None:
    """The lighthouse reads no further request until its answers have been taken."""
    lighthouse = run_lighthouse()
    pid = lighthouse.process.pid
    before = peak_mb(pid)
    blob = f"GET {path} HTTP/1.1\r\n\r\n".encode() * 3600
    sent = 0
    with dial(lighthouse.address, receive_bytes=4096) as sock:
        sock.settimeout(1.0)  # nobody takes more: that is how it should end
        try:
            while sent < 20 << 20 and peak_mb(pid) - before < 200:
                sent += sock.send(blob)
        except (TimeoutError, ConnectionError):  # or it is cut off: far too many questions at once
            pass
        assert ask(lighthouse.address) == 200
        assert peak_mb(pid) - before < 30


def test_every_pipelined_request_is_answered_once_the_answers_are_read(run_lighthouse: RunLighthouse) -> None:
    """Held back, not lost: also when all of them were sent before the first answer was read."""
    with dial(run_lighthouse().address, receive_bytes=1 << 16) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 299 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = b""
        while piece := sock.recv(1 << 16):
            answers += piece
    assert answers.count(b"HTTP/1.1 200 OK") == 300


def test_many_who_read_a_large_answer_slowly_cost_no_more_memory_than_a_few() -> None:
    """The status of a large job, asked for by hundreds who hardly read: the slowest are cut off, one who reads has it all."""
    body = b"x" * (8 << 20)  # the kernel takes a few megabytes of each

    async def play() -> None:
        made: list[HttpConnection] = []

        def connect() -> HttpConnection:
            made.append(HttpConnection(lambda request: Answer(body=body), slots))
            return made[-1]

        slots, loop = HttpSlots(256), asyncio.get_running_loop()
        server = await loop.create_server(connect, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        with ExitStack() as stack:
            for _ in range(12):
                slow = stack.enter_context(dial(address, receive_bytes=4096))
                slow.sendall(b"GET / HTTP/1.1\r\n\r\n")
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(body)
            writer.close()
            waiting = [each._transport.get_write_buffer_size() for each in made if each._transport]
            assert len(made) == 13 and 0 < sum(waiting) <= ALL_UNREAD_BYTES
        server.close()
        while any(slots.open):
            await asyncio.sleep(0.001)

    asyncio.run(play())


def test_an_event_is_not_copied_for_everybody_who_listens() -> None:
    """256 unauthenticated listeners who read nothing took 86 MB with the status of a thousand replicas: a copy for each."""
    written: list[bytes | memoryview] = []

    class Recorder(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            return 0

        def write(self, data: object) -> None:
            assert isinstance(data, (bytes, memoryview))
            written.append(data)

    status = b'{"replicas": []}'
    EventStream(Recorder()).send(status)
    assert b"".join(written) == b"data: " + status + b"\n\n"
    assert any(isinstance(part, memoryview) and part.obj is status for part in written)


def test_requests_of_many_connections_at_once_take_turns() -> None:
    """Each with a request of its own: members are heard in between, and those that are gone cost no turn."""

    async def play() -> None:
        slots, loop = HttpSlots(256), asyncio.get_running_loop()
        rounds = 0  # of the loop: in each one members are heard
        handled: list[int] = []

        def count() -> None:
            nonlocal rounds
            rounds += 1
            loop.call_soon(count)

        def handle(request: HttpRequest) -> Answer:
            handled.append(rounds)
            return Answer()

        count()

        server = await loop.create_server(lambda: HttpConnection(handle, slots), "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        with ExitStack() as stack:
            crowd = [stack.enter_context(dial(address)) for _ in range(40)]
            for each in crowd:
                each.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for each in crowd[20:]:
                each.close()
            for each in crowd[:20]:
                await loop.run_in_executor(None, each.recv, 8)
        server.close()
        while any(slots.open):
            await asyncio.sleep(0.001)
        # without turns: all in a few rounds; a loop that had to wait for the CPU may serve two in one
        assert len(set(handled)) > len(handled) / 2

    asyncio.run(play())


@pytest.mark.parametrize("path", ["/api/status", "/metrics", "/status"])
def test_an_answer_about_everybody_is_made_once_for_those_who_ask_at_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes milliseconds with thousands of replicas. What has happened in between is in the next answer."""
    monkeypatch.setattr(web, "KEEP_S", 60.0)

    async def play() -> None:
        service = Service(Options(), asyncio.get_running_loop())
        page, made = Web(service, ""), 0

        def counted(of: Service) -> Status:
            nonlocal made
            made += 1
            return take_snapshot(of)

        monkeypatch.setattr(web, "take_snapshot", counted)
        answers = {page.handle(HttpRequest("GET", path)).body for _ in range(50)}
        assert (made, len(answers)) == (1, 1)
        service.event_log.event("evicted", "replica-7 evicted", "replica-7")
        page.handle(HttpRequest("GET", path))
        assert made == 2
        service.close()

    asyncio.run(play())


def test_a_head_of_many_lines_is_refused() -> None:
    """Reading it costs ten times as much as one of the same size with few."""
    lines = [f"{number:x}: 1" for number in range(MAX_LINES + 1)]
    assert _parse_head("\r\n".join(["GET / HTTP/1.1", *lines[:-1]]).encode())
    with pytest.raises(ValueError, match="more than 100"):
        _parse_head("\r\n".join(["GET / HTTP/1.1", *lines]).encode())


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:{port}", "localhost", "[::1]:{port}", "node-7", "lighthouse.jobs.svc:1", "page.example.org"],
)
def test_names_that_no_unknown_client_can_register_are_answered(host: str) -> None:
    """Addresses, names without a dot, this machine's own, those of a cluster, and those that were allowed."""
    with Lighthouse(Options(), ServerOptions(), allow_hosts=(("page.example.org",))) as lighthouse:
        port = lighthouse.address.rpartition(":")[2]
        assert ask(lighthouse.address, "/api/status", Host=host.format(port=port)) == 200


@pytest.mark.parametrize(
    "host",
    [
        "[::1].attacker.example",
        "[::1]attacker.example:80",
        "attacker.example.",
        "localhost@attacker.example",
        "[attacker.example",
    ],
)
def test_names_that_only_begin_like_an_address_are_refused(host: str) -> None:
    """What stands after the bracket belongs to the name, too."""
    with Lighthouse(Options(), ServerOptions()) as lighthouse:
        assert ask(lighthouse.address, "/api/status", Host=host) == 421


@pytest.mark.parametrize("mark", ["\n", "\r", "\0"])
@pytest.mark.parametrize("place", ["GET /{}x HTTP/1.1\r\nA: b", "GET / HTTP/1.1\r\nA: b{}Content-Length: 5"])
def test_half_an_end_of_line_is_refused(mark: str, place: str) -> None:
    """A proxy that takes it for a whole one would see other headers, and another end of the request, than we do."""
    assert _parse_head(place.format("").encode())
    with pytest.raises(ValueError, match="lone CR or LF"):
        _parse_head(place.format(mark).encode())


@pytest.mark.parametrize("path", ["/", "/api/status", "/api/events", "/metrics"])
def test_a_foreign_host_name_is_refused(path: str) -> None:
    """A web page whose name was made to point here (DNS rebinding) reads nothing; the fix is in the answer."""
    with Lighthouse(Options(), ServerOptions()) as lighthouse:
        connection = http.client.HTTPConnection(lighthouse.address, timeout=20)
        connection.request("GET", path, headers={"Host": "attacker.example"})
        answer = connection.getresponse()
        assert answer.status == 421
        assert b"--allow-host attacker.example" in answer.read()
        connection.close()


def test_an_action_from_another_origin_is_refused_even_with_the_token() -> None:
    """A browser that holds the token acts for our own page only."""
    with Lighthouse(Options(), ServerOptions(token="t")) as lighthouse:
        for origin, expected in (("http://evil.example", 403), (f"http://{lighthouse.address}", 200)):
            connection = http.client.HTTPConnection(lighthouse.address, timeout=20)
            connection.request("POST", "/api/collect", "{}", {"Authorization": "Bearer t", "Origin": origin})
            assert connection.getresponse().status == expected
            connection.close()


def test_unknown_clients_who_keep_connections_open_do_not_hold_all_places(
    run_lighthouse: RunLighthouse,
) -> None:
    """The host with most connections loses its oldest; a person at another address is answered."""
    lighthouse = run_lighthouse()
    host, port = lighthouse.address.rsplit(":", 1)
    request = b"GET /healthz HTTP/1.1\r\n\r\n"
    with ExitStack() as stack:
        kept = [stack.enter_context(dial(lighthouse.address)) for _ in range(MAX_CONNECTIONS + 44)]
        for sock in kept:
            sock.sendall(request)
        assert kept[-1].recv(9) == b"HTTP/1.1 "  # so all of them have come in, in their order
        person = http.client.HTTPConnection(host, int(port), timeout=20, source_address=("127.0.0.2", 0))
        stack.callback(person.close)
        person.request("GET", "/healthz")
        assert person.getresponse().status == 200
        with pytest.raises((ConnectionError, AssertionError)):  # the oldest is closed, its answer read or not
            while True:
                kept[0].sendall(request)
                assert kept[0].recv(65536)


def test_connections_that_make_room_while_their_requests_wait_are_no_errors(
    run_lighthouse: RunLighthouse,
) -> None:
    """More of them than there are places, all at once: not a line in the log, where there was a traceback for each."""
    lighthouse = run_lighthouse()
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 100):
            sock = stack.enter_context(contextlib.closing(dial(lighthouse.address)))
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert ask(lighthouse.address) == 200
    assert ask(lighthouse.address) == 200
    assert "Traceback" not in lighthouse.log()


def test_the_token_is_not_taken_over_an_unencrypted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """From this machine it is; from elsewhere the answer names TLS, the command and a tunnel."""
    with Lighthouse(Options(), ServerOptions(token="t")) as lighthouse:
        for private, status, words in ((True, 200, b"incident"), (False, 403, b"ssh tunnel")):
            monkeypatch.setattr("allranks.lighthouse.http._is_private", lambda _, value=private: value)
            connection = http.client.HTTPConnection(lighthouse.address, timeout=20)
            connection.request("POST", "/api/collect", "{}", {"Authorization": "Bearer t"})
            answer = connection.getresponse()
            assert (answer.status, words in answer.read()) == (status, True)
            connection.close()


@pytest.mark.parametrize(
    ("peer", "private"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.1.2.3", False), ("fe80::1%eth0", False)],
)  # fmt: skip
def test_only_this_machine_counts_as_private_without_tls(peer: str, private: bool) -> None:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return (peer, 1234) if name == "peername" else default

    assert _is_private(Transport()) is private
