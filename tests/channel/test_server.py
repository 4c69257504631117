"""The server for members: unknown clients cost little and take no member's place."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from allranks.channel.keys import ChannelError, Keyring, greet_as_client
from allranks.channel.server import MAX_UNAUTHENTICATED, MemberServer

KEYS = Keyring("the job token")


def echo(connection: socket.socket, purpose: str) -> None:
    while data := connection.recv(100):
        connection.sendall(purpose.encode() + b":" + data)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    running = MemberServer(KEYS, "quorum", echo)
    running.start(listener)
    yield listener.getsockname()
    running.close()


def member(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, 20)
    greet_as_client(sock, KEYS.for_quorum(1, 2))
    return sock


def talk(sock: socket.socket) -> bytes:
    sock.sendall(b"x")
    return sock.recv(100)


def test_members_are_served_with_their_purpose(server: tuple[str, int]) -> None:
    with member(server) as sock:
        assert talk(sock) == b"quorum 1.2:x"


def test_silent_unknown_clients_hold_no_place_of_a_member(server: tuple[str, int]) -> None:
    """Three times as many as may be greeted at a time; who is inside stays, who comes later gets in."""
    with ExitStack() as stack:
        before = threading.active_count()
        early = stack.enter_context(member(server))
        for _ in range(3 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(server, 20))
        assert talk(early) == b"quorum 1.2:x"
        assert talk(stack.enter_context(member(server))) == b"quorum 1.2:x"
        assert (
            threading.active_count() <= before + 2
        )  # one for each of the two members, none for an unknown client


def test_more_members_than_unknown_clients_may_be_there(server: tuple[str, int]) -> None:
    with ExitStack() as stack:
        everybody = [stack.enter_context(member(server)) for _ in range(MAX_UNAUTHENTICATED + 10)]
        assert {talk(sock) for sock in everybody} == {b"quorum 1.2:x"}


def test_a_crowd_of_one_host_does_not_push_out_a_slow_member_of_another(server: tuple[str, int]) -> None:
    """It has connected, and is slow to answer the greeting; unknown clients of another address come in the meantime."""
    with ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(server, 20, source_address=("127.0.0.2", 0)))
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(server, 20)).send(b"\x08")
        assert talk(stack.enter_context(member(server))) == b"quorum 1.2:x"  # so all of them have come in
        greet_as_client(slow, KEYS.for_quorum(1, 2))
        assert talk(slow) == b"quorum 1.2:x"


def test_the_limit_is_for_the_whole_greeting() -> None:
    """One byte now and then keeps no place."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = MemberServer(KEYS, "quorum", echo, greeting_s=0.3)
    running.start(listener)
    with socket.create_connection(listener.getsockname(), 20) as sock, pytest.raises(OSError):
        sock.recv(100)
        sock.settimeout(0.05)
        for _ in range(200):  # less than a whole greeting
            sock.sendall(b"\xff")
            with suppress(TimeoutError):
                assert sock.recv(100) == b""
                raise ConnectionError("closed")
    running.close()


@pytest.mark.filterwarnings("error")  # of sockets that nobody closed
def test_it_goes_on_when_the_kernel_watches_no_more_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """fs.epoll.max_user_watches counts all processes of a user; who comes when it is used up is refused, not all after it."""
    refused = []

    class Crowded(selectors.DefaultSelector):
        def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
            if data is not None and len(refused) < 2:
                refused.append(fileobj)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().register(fileobj, events, data)

    monkeypatch.setattr(selectors, "DefaultSelector", Crowded)
    listener = socket.create_server(("127.0.0.1", 0))
    running = MemberServer(KEYS, "quorum", echo)
    running.start(listener)
    try:
        for _ in range(2):
            with (
                socket.create_connection(listener.getsockname(), 20) as unlucky,
                suppress(ConnectionResetError),
            ):
                assert unlucky.recv(100) == b""
        with member(listener.getsockname()) as sock:
            assert talk(sock) == b"quorum 1.2:x"
    finally:
        running.close()
    assert len(refused) == 2


def test_unknown_clients_are_closed_with_the_server() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    running = MemberServer(KEYS, "quorum", echo)
    running.start(listener)
    with socket.create_connection(listener.getsockname(), 20) as sock:
        assert len(sock.recv(100)) == 32  # its greeting: it has been accepted
        running.close()
        assert sock.recv(100) == b""


def test_an_unknown_client_is_closed(server: tuple[str, int]) -> None:
    sock = socket.create_connection(server, 20)
    with sock, pytest.raises((ChannelError, OSError)):
        greet_as_client(sock, Keyring("wrong").for_quorum(1, 2))


LITTLE = """
import resource, socket, sys, time
from allranks.channel.keys import Keyring
from allranks.channel.server import MemberServer
listener = socket.create_server(("127.0.0.1", 0), backlog=512)
server = MemberServer(Keyring("the job token"), "quorum", lambda sock, purpose: sock.sendall(b"served"))
used = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
server.start(listener)
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_it_goes_on_accepting_after_it_had_no_descriptor_left() -> None:
    """EMFILE is not an end: unknown clients go, and members get in again."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", LITTLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as stack,
    ):
        assert process.stdout is not None and process.stdin is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        for _ in range(60):
            stack.enter_context(socket.create_connection(address, 20))
        with member(address) as sock:
            assert sock.recv(100) == b"served"
        process.stdin.close()
        assert process.wait(20) == 0
