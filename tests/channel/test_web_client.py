"""What is asked over HTTP may be answered by anything: the port of a lighthouse that is gone belongs to anyone who takes it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from allranks.channel.web_client import get
from allranks.doctor import DoctorOptions
from allranks.doctor.services import check_lighthouse, clock_offset_s
from allranks.incidents.job_overview import LighthouseView, ask_lighthouse


@contextmanager
def server(answer: bytes, again: bytes = b"", every_s: float = 0.0) -> Iterator[str]:
    """HOST:PORT of a server that answers so whatever it is asked, and repeats `again` until it is left."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not over.is_set():
            with suppress(OSError):
                connection = listener.accept()[0]
                threads.append(threading.Thread(target=talk, args=(connection,)))
                threads[-1].start()

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(answer)
            while again and not over.wait(every_s):
                connection.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=serve, args=(listener,))]
        threads[0].start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(20)


OK = b"HTTP/1.1 200 OK\r\n"
STRANGE = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "escape sequences": b"\x1b]0;title\x07\x1b[2J\r\n\r\n",
    "no number": b"HTTP/1.1 abc\r\n\r\n",
    "nothing": b"",
    "a shorter body": OK + b"Content-Length: 200\r\n\r\n{",
    "bad chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "another place": b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
}
NO_STATUS = {
    "a list": b"[]",
    "no JSON": b"hello",
    "deep": b"[" * 200_000,
    "other types": b'{"line": "x", "incidents": [1], "nodes": 5}',
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
def test_what_is_no_answer_is_said_in_a_sentence(answer: bytes) -> None:
    """By doctor and top; nothing is raised, nothing else is asked."""
    with server(answer) as address:
        options = DoctorOptions(lighthouse=address, timeout_s=20.0)
        (check,) = check_lighthouse(options)
        assert (check.status, check.detail.startswith(f"{address} does not answer: ")) == ("problem", True)
        assert check.detail.isprintable()
        assert clock_offset_s(options) is None
        assert ask_lighthouse(address) == LighthouseView()


@pytest.mark.parametrize("body", NO_STATUS.values(), ids=NO_STATUS)
def test_what_is_no_status_is_said_in_a_sentence(body: bytes) -> None:
    with server(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as address:
        assert ask_lighthouse(address) == LighthouseView()


def test_control_characters_in_a_status_are_shown_plainly() -> None:
    body = b'{"line": {"state": "ok", "level": "good", "text": "\\u001b[2J"}, "incidents": [], "nodes": []}'
    with server(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as address:
        line = ask_lighthouse(address).line
        assert line is None or line.text == "?[2J"  # None: this machine is too busy to answer in time


@pytest.mark.parametrize("date", [b"never", b"Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_date_that_is_none_tells_no_time(date: bytes) -> None:
    with server(OK + b"Date: " + date + b"\r\nContent-Length: 0\r\n\r\n") as address:
        assert clock_offset_s(DoctorOptions(lighthouse=address, timeout_s=20.0)) is None


def test_the_time_limit_is_for_the_whole_answer() -> None:
    """A header line every moment, without end."""
    with server(OK, b"X: y\r\n", 0.01) as address, pytest.raises(TimeoutError):
        get(address, "/", 0.3)


def test_an_endless_answer_is_cut_off() -> None:
    with server(OK + b"\r\n", b" " * (1 << 16)) as address, pytest.raises(OSError, match="longer than 1 MB"):
        get(address, "/", 60.0, limit=1 << 20)


def test_a_real_answer_is_read_whole() -> None:
    """With a length, and until the server closes."""
    date = b"Date: Mon, 16 Nov 2026 12:00:00 GMT\r\n"
    for head in (OK + date + b"Content-Length: 9\r\n\r\n", OK + date + b"\r\n"):
        with server(head + b'{"a": 12}') as address:
            answer = get(address, "/", 20.0)
        assert (answer.status, answer.object(), answer.time_s()) == (200, {"a": 12}, 1794830400.0)
