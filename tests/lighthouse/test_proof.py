"""The job token is proved, never sent: anyone who listens, records, replays or plays the lighthouse learns nothing."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from allranks.channel.frames import HEAD, split_address, take_frames
from allranks.errors import LighthouseRefused, LighthouseUnreachable
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.messages import PREAMBLE, Challenge, Hello, Proof, Refused, Welcome, decode, encode
from allranks.lighthouse.options import ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import Member

TOKEN = "the-token-of-this-job"
Embedded = Callable[..., Lighthouse]
Answer = Callable[[object, bytes], list[object]]


class Frames:
    """Reads messages off a socket, one at a time; keeps all bytes that came."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.seen = b""
        self._rest = bytearray()
        self._ready: list[tuple[object, bytes]] = []

    def next(self) -> tuple[object, bytes]:
        """(message, its payload)."""
        while not self._ready:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionError("closed")
            self.seen += data
            self._rest += data if self.seen != data else data.removeprefix(PREAMBLE)
            self._ready = [
                (decode(kind, payload)[0], payload) for kind, payload in take_frames(self._rest, 1 << 20)
            ]
        return self._ready.pop(0)


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that does this with every connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.settimeout(20)
            with sock:
                try:
                    serve(sock)
                except (ConnectionError, OSError):
                    pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


def impostor(answer: Answer) -> Callable[[socket.socket], None]:
    """A lighthouse that says what `answer(message, payload)` gives."""

    def serve(sock: socket.socket) -> None:
        frames = Frames(sock)
        while True:
            for message in answer(*frames.next()):
                sock.sendall(encode(message))

    return serve


def say(lighthouse: Lighthouse, data: bytes) -> list[object]:
    """What it answers to these bytes, until it closes the connection."""
    with socket.create_connection(split_address(lighthouse.address), 20) as sock:
        frames, answers = Frames(sock), []
        sock.sendall(data)
        try:
            while True:
                answers.append(frames.next()[0])
        except ConnectionError:
            return answers


def refusal(address: str, token: str = TOKEN) -> LighthouseRefused:
    """Why a client of this token does not want, or may not have, this lighthouse."""
    with pytest.raises(LighthouseRefused) as caught:
        Client(ClientOptions(addresses=(address,), token=token, replica="a")).start(20)
    return caught.value


@pytest.fixture
def guarded(embedded: Embedded) -> Lighthouse:
    """A lighthouse with a token."""
    return embedded(ServerOptions(token=TOKEN))


def tapped(lighthouse: Lighthouse) -> tuple[bytes, bytes]:
    """What one client and this lighthouse say to each other: from the client, and to it."""
    sent, came = bytearray(), bytearray()

    def pump(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
        try:
            while data := source.recv(65536):
                copy.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve(sock: socket.socket) -> None:
        with socket.create_connection(split_address(lighthouse.address), 20) as there:
            back = threading.Thread(target=pump, args=(there, sock, came), daemon=True)
            back.start()
            pump(sock, there, sent)
            back.join(20)

    with listening(serve) as address:
        client = Client(ClientOptions(addresses=(address,), token=TOKEN, replica="a")).start(20)
        assert client.join(Member("a"), timeout_s=20).names == ("a",)
        client.close()
    return bytes(sent), bytes(came)


def test_whoever_listens_on_the_wire_does_not_see_the_token(guarded: Lighthouse) -> None:
    """Not in the hello, nor anywhere else."""
    sent, came = tapped(guarded)
    assert b'"replica":"a"' in sent and b'"number":1' in came  # it was the whole conversation
    assert TOKEN.encode() not in sent + came


def test_a_recorded_conversation_opens_nothing_a_second_time(guarded: Lighthouse) -> None:
    """The lighthouse's nonce is new each time."""
    sent, _ = tapped(guarded)
    answers = say(guarded, sent)
    assert [type(answer) for answer in answers] == [Challenge, Refused]
    assert isinstance(answers[1], Refused) and answers[1].code == "token"


def test_a_hello_changed_on_the_way_is_refused(guarded: Lighthouse) -> None:
    """The proof is for the hello that was said: nobody else's name gets in with it."""

    def serve(sock: socket.socket) -> None:
        with socket.create_connection(split_address(guarded.address), 20) as there:
            here, far = Frames(sock), Frames(there)
            hello, _ = here.next()
            assert isinstance(hello, Hello)
            there.sendall(PREAMBLE + encode(Hello(nonce=hello.nonce, replica="another")))
            sock.sendall(encode(far.next()[0]))
            there.sendall(encode(here.next()[0]))
            sock.sendall(encode(far.next()[0]))

    with listening(serve) as address:
        assert refusal(address).code == "token"


def test_a_lighthouse_that_sends_our_own_proof_back_is_refused() -> None:
    """Reflection: the two sides prove different things."""

    def answer(message: object, payload: bytes) -> list[object]:
        if isinstance(message, Hello):
            return [Challenge(message.nonce)]
        return [message, Welcome("here", 1.0, 5.0, 1, 0)]

    with listening(impostor(answer)) as address:
        assert "does not know our job token" in str(refusal(address))


@pytest.mark.parametrize("proof", [[], [Proof("")], [Proof("00" * 32)], [Proof("\xe9")]])
def test_a_lighthouse_that_cannot_prove_the_token_is_refused(proof: list[object]) -> None:
    """Anyone who answers at the address could send us anything."""
    with listening(impostor(lambda *_: [*proof, Welcome("here", 1.0, 5.0, 1, 0)])) as address:
        assert "does not know our job token" in str(refusal(address))


def test_a_client_without_a_token_learns_both_ways_to_go_on(guarded: Lighthouse) -> None:
    """The error names the variable for the client, and the flag for a lighthouse that needs none."""
    with pytest.raises(LighthouseRefused, match="no job token") as caught:
        Client(ClientOptions((guarded.address,), replica="a")).start(10)
    assert "ALLRANKS_TOKEN" in caught.value.hint and "--no-token" in caught.value.hint


def test_a_client_with_a_token_refuses_a_lighthouse_without_one(embedded: Embedded) -> None:
    """It says what may be the matter."""
    assert "--no-token" in str(refusal(embedded().address))


def test_a_client_of_an_older_release_is_told_so_in_one_sentence(
    guarded: Lighthouse, caplog: pytest.LogCaptureFixture
) -> None:
    """It sent the token itself in its hello; the answer is a refusal that it understands. The log says which replica it was."""
    old = b'{"token":"%s","version":1,"role":"replica","replica":"a","session":"s"}' % TOKEN.encode()
    (answer,) = say(guarded, PREAMBLE + HEAD.pack(len(old), 1) + old)
    assert isinstance(answer, Refused) and answer.code == "version"
    assert "speaks version 2, the client 1: install the same allranks on both sides" in answer.message
    assert "(it calls itself 'a') refused (version): this lighthouse speaks version 2" in caplog.text


@pytest.mark.parametrize("second", [Hello(replica="b"), Challenge("x"), Welcome("x", 1.0, 1.0, 1, 0)])
def test_unknown_clients_can_say_nothing_but_a_hello_and_a_proof(guarded: Lighthouse, second: object) -> None:
    """Everything else closes the connection."""
    answers = say(guarded, PREAMBLE + encode(Hello(replica="a")) + encode(second))
    assert isinstance(answers[-1], Refused) and answers[-1].code == "garbage"


def test_an_unknown_client_cannot_make_the_lighthouse_unpack_more_than_a_hello(guarded: Lighthouse) -> None:
    """Nor can it claim a frame that large."""
    packed = zlib.compress(b'{"replica":"' + b"a" * (1 << 20) + b'"}', 9)
    (answer,) = say(guarded, PREAMBLE + HEAD.pack(len(packed), 0x81) + packed)
    assert isinstance(answer, Refused) and "larger than 16384 bytes" in answer.message
    (answer,) = say(guarded, PREAMBLE + HEAD.pack(0xFFFFFFFF, 1) + b"x")
    assert isinstance(answer, Refused) and "at most 16384 are allowed" in answer.message


@pytest.mark.parametrize("packed", [True, False])
def test_an_impostor_cannot_fill_a_clients_memory(packed: bool) -> None:
    """Before the proof a client takes little; it says what came, and continues to look for its lighthouse."""
    bomb = encode(Refused("draining", "x" * (8 << 20)))
    if not packed:
        bomb = HEAD.pack(8 << 20, bomb[HEAD.size - 1] & 0x7F) + b"x" * (2 << 20)
    came: list[int] = []

    def serve(sock: socket.socket) -> None:
        Frames(sock).next()
        came.append(1)
        sock.sendall(bomb)
        sock.recv(1)

    with (
        listening(serve) as address,
        pytest.raises(LighthouseUnreachable, match="not a lighthouse of this version"),
    ):
        Client(ClientOptions(addresses=(address,), token=TOKEN, replica="a")).start(3)
    assert came
