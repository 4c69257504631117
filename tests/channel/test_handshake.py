"""Mutual proof: who does not know the token gets in nowhere, whatever was recorded, sent back or passed on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allranks.channel.keys import (
    MAGIC,
    NONCE_BYTES,
    ChannelError,
    Credential,
    Keyring,
    ServerGreeting,
    greet_as_client,
)

KEYS = Keyring("the job token")
OURS = KEYS.for_quorum(1, 7)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    server, client = socket.socketpair()
    with server, client:
        yield server, client


class Running:
    """A function in a thread; `outcome()` is what it returned, or raises what it raised."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args, options), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: Any, options: Any) -> None:
        try:
            self._result = function(*args, **options)
        except BaseException as error:
            self._error = error
            args[0].close()

    def outcome(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def greet_as_server(sock: socket.socket, keys: Keyring, kind: str, server: str) -> str:
    """As the server does it, over a socket that waits."""
    greeting = ServerGreeting(keys, kind, server)
    sock.sendall(greeting.hello)
    while (proved := greeting.take(sock.recv(greeting.wanted))) is None:
        pass
    sock.sendall(proved[1])
    return proved[0]


def test_both_sides_know_each_other_and_the_server_the_purpose(pair: Pair) -> None:
    server = Running(greet_as_server, pair[0], KEYS, "quorum", "host:1")
    greet_as_client(pair[1], OURS, "host:1")
    assert server.outcome() == "quorum 1.7"


@pytest.mark.parametrize(
    "credential",
    [
        Keyring("another token").for_quorum(1, 7),
        Keyring("").for_quorum(1, 7),
        Credential("quorum 1.8", OURS.key),
        Credential("quorum 2.7", OURS.key),
        Credential("quorum 1.7", KEYS.for_purpose("snapshots").key),
        KEYS.for_purpose("snapshots"),
        KEYS.for_purpose(""),
    ],
    ids=[
        "another-token",
        "no-token",
        "another-number",
        "another-epoch",
        "another-use",
        "not-served",
        "no-purpose",
    ],
)
def test_a_client_without_the_right_key_is_refused(pair: Pair, credential: Credential) -> None:
    server = Running(greet_as_server, pair[0], KEYS, "quorum", "host:1")
    with pytest.raises((ChannelError, OSError)):
        greet_as_client(pair[1], credential, "host:1")
    with pytest.raises(ChannelError, match="does not know the key"):
        server.outcome()


def test_a_server_without_the_key_is_refused(pair: Pair) -> None:
    """Also one that accepts everybody."""
    client = Running(greet_as_client, pair[1], OURS, "host:1")
    pair[0].sendall(MAGIC + b"n" * NONCE_BYTES)
    pair[0].recv(1000)
    pair[0].sendall(b"p" * 32)
    with pytest.raises(ChannelError, match="does not know the key"):
        client.outcome()


def test_a_recorded_greeting_cannot_be_used_again(pair: Pair) -> None:
    """The words of a right client, said to the same server once more."""
    said = _record(pair)
    server_end, replayer = socket.socketpair()
    with server_end, replayer:
        server = Running(greet_as_server, server_end, KEYS, "quorum", "host:1")
        replayer.recv(1000)
        replayer.sendall(said)
        with pytest.raises(ChannelError, match="does not know the key"):
            server.outcome()


def _record(pair: Pair) -> bytes:
    """What a client says to a server that lets it in."""
    front, back = socket.socketpair()
    with front, back:
        server = Running(greet_as_server, back, KEYS, "quorum", "host:1")
        client = Running(greet_as_client, pair[1], OURS, "host:1")
        pair[0].sendall(front.recv(1000))
        said = pair[0].recv(1000)
        front.sendall(said)
        pair[0].sendall(front.recv(1000))
        client.outcome()
        assert server.outcome() == "quorum 1.7"
    return said


def test_a_proof_sent_back_proves_nothing(pair: Pair) -> None:
    """Neither the client's own proof, nor one it was made to compute over its own nonce."""
    client = Running(greet_as_client, pair[1], OURS, "host:1")
    pair[0].sendall(MAGIC + b"n" * NONCE_BYTES)
    pair[0].sendall(pair[0].recv(1000)[-32:])
    with pytest.raises(ChannelError, match="does not know the key"):
        client.outcome()


def test_a_proof_meant_for_one_server_does_not_open_another(pair: Pair) -> None:
    """A man in the middle passes both sides' words on unchanged."""
    front, back = socket.socketpair()
    with front, back:
        server = Running(greet_as_server, back, KEYS, "quorum", "host:1")
        client = Running(greet_as_client, pair[1], OURS, "man:2")
        pair[0].sendall(front.recv(1000))
        front.sendall(pair[0].recv(1000))
        with pytest.raises(ChannelError, match="does not know the key"):
            server.outcome()
        pair[0].close()
        with pytest.raises((ChannelError, OSError)):
            client.outcome()


def test_keys_are_not_shown() -> None:
    """They do not get into logs and tracebacks by accident."""
    shown = f"{KEYS!r} {OURS!r} {KEYS} {OURS}"
    assert "the job token" not in shown and repr(OURS.key) not in shown and OURS.key.hex() not in shown
