"""Small parts: codec, clock, addresses, black box header, options, healing, tickets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from allranks.blackbox import header, layout
from allranks.channel.frames import BadFrame, join_address, split_address, take_frames
from allranks.channel.server import ConnectionSlots
from allranks.errors import ConfigurationError
from allranks.lighthouse import messages
from allranks.lighthouse.client.liveness_proxy import read_mark
from allranks.lighthouse.connection import Connection
from allranks.lighthouse.detect import AwakeClock
from allranks.lighthouse.messages import decode, encode, load, plain_dump, plain_load
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.sessions import Session, Sessions
from allranks.model.cluster import CollectEvidence, Member, MemberLost, Quorum

QUORUM = Quorum(
    7,
    2,
    (Member("a", step=3, data='{"x": "ü"}'), Member("b", shrink_only=True)),
    "why",
    9,
    3,
    spares=("c",),
)
SAMPLES = [
    QUORUM, MemberLost("a", "gone", ms=1.5, certain=False), CollectEvidence("i", "r", ("a", "b")),
    messages.Hello(nonce="t", replica="a"), messages.Challenge("c"), messages.Proof("p"), messages.Join(Member("a"), 5), messages.Beat(1, 2, 0.5, "ok", True),
]  # fmt: skip


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_both_codecs_read_and_write_the_same(message: object) -> None:
    """A rank without msgspec and a lighthouse with it understand each other."""
    kind = type(message)
    assert load(kind, plain_dump(message)) == message
    assert plain_load(kind, plain_dump(message)) == message
    ((code, payload),) = take_frames(bytearray(encode(message, 5)), 1 << 20)
    assert decode(code, payload)[0] == message
    assert json.loads(plain_dump(message)) == json.loads(json.dumps(asdict(message)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (messages.Beat, '{"step": "three"}'), (messages.Beat, "[]"), (messages.Join, "{}"),
        (Quorum, '{"number": 1, "epoch": 1, "members": {}}'), (messages.Hello, '{"version": true}'),
        (Quorum, '{"number": 1, "epoch": 1, "members": [], "spares": {"a": 1}}'), (messages.Beat, "nonsense"),
    ],
)  # fmt: skip
def test_both_codecs_refuse_the_same(kind: type, text: str) -> None:
    """Types are checked, whichever one reads."""
    for read in (load, plain_load):
        with pytest.raises(BadFrame):
            read(kind, text.encode())


def test_both_codecs_ignore_fields_of_a_later_version() -> None:
    """So that a message may grow."""
    for read in (load, plain_load):
        assert read(messages.Ack, b'{"id": 3, "colour": "blue"}') == messages.Ack(3)


def test_a_large_quorum_travels_packed_and_a_bomb_is_refused() -> None:
    """Thousands of members in a few kilobytes; what unpacks beyond the limit is not unpacked."""
    large = Quorum(1, 1, tuple(Member(f"replica-{i}", address="10.0.0.1:1") for i in range(2000)))
    frame = encode(large)
    assert len(frame) < 100_000
    ((code, payload),) = take_frames(bytearray(frame), 1 << 20)
    assert decode(code, payload)[0] == large
    with pytest.raises(BadFrame, match="larger than"):
        decode(code, payload, limit=10_000)


@given(st.lists(st.sampled_from(SAMPLES), max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_cutting_of_the_stream(sent: list[object], sizes: list[int]) -> None:
    """TCP gives pieces, not messages."""
    stream, buffer, got, turn = b"".join(encode(each) for each in sent), bytearray(), [], 0
    while stream:
        size = sizes[turn % len(sizes)]
        turn += 1
        buffer += stream[:size]
        stream = stream[size:]
        got += [decode(code, payload)[0] for code, payload in take_frames(buffer, 1 << 20)]
    assert got == sent
    assert not buffer


@given(st.integers(0, 255), st.binary(max_size=200))
def test_no_payload_breaks_the_decoder(kind: int, payload: bytes) -> None:
    """It decodes or it is a BadFrame; nothing else comes out."""
    try:
        decode(kind, payload)
    except BadFrame:
        pass


def test_kinds_keep_their_numbers() -> None:
    """They are on the wire: append only."""
    first = [messages.KINDS[i].__name__ for i in range(1, 9)]
    assert first == ["Hello", "Beat", "Join", "Withdraw", "Leave", "Died", "Ack", "Command"]
    assert messages.KINDS[messages.FIRST_NOTICE] is MemberLost


def test_time_asleep_does_not_count() -> None:
    """A clock that stood still for a minute moves by one step only."""
    clock = AwakeClock(max_step_s=0.5)
    start = clock.tick(100.0)
    assert clock.tick(100.3) - start == pytest.approx(0.3)
    assert clock.tick(160.3) - start == pytest.approx(0.8)
    assert clock.slept_s == pytest.approx(59.5)


def test_the_silent_are_found_and_the_next_look_is_planned() -> None:
    """Nobody is looked at more often than needed."""
    sessions = Sessions()
    for i, heard in enumerate((1.0, 4.0, 9.0)):
        sessions.add(Session(str(i), "", 0, False, "", 1, None, heard))
    silent, again = sessions.find_silent(10.0, 6.0)
    assert [session.replica for session in silent] == ["0", "1"]
    assert again == 15.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)), ("[::1]:5", ("::1", 5)), ("http://h:2/", ("h", 2)), ("host", ("host", 29510)),
        ("[::]:29510", ("::", 29510)), (":80", ("0.0.0.0", 80)),
    ],
)  # fmt: skip
def test_addresses_are_read_as_people_write_them(text: str, expected: tuple[str, int]) -> None:
    """Including torchft's default."""
    assert split_address(text) == expected


def test_addresses_that_make_no_sense_are_refused() -> None:
    """And IPv6 gets its brackets back."""
    for text in ("host:99999", "host:"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_address(text)
    assert join_address("::1", 3) == "[::1]:3"


def test_the_beacons_view_of_a_black_box_is_the_recorders(tmp_path: Path) -> None:
    """struct and numpy agree on every field, and numpy is not needed."""
    row = np.zeros((), layout.HEADER)
    row["magic"], row["version"] = header.MAGIC, header.VERSION
    row["step"], row["calls_started"], row["calls_completed"], row["closed"] = 12, 7, 6, b"signal 15"
    box = tmp_path / "rank.box"
    box.write_bytes(row.tobytes().ljust(4096, b"\0"))
    mark = read_mark(str(box))
    assert mark is not None
    assert (mark.step, mark.count, mark.closed) == (12, 25, "signal 15")
    assert read_mark(str(tmp_path / "none")) is None
    box.write_bytes(b"something else entirely" * 50)
    assert read_mark(str(box)) is None
    code = "import sys, allranks.lighthouse.client.liveness_proxy; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_replicas": 0}, r"min_replicas \(0\) must be at least 1"),
        ({"heartbeat_timeout_s": 1.0, "heartbeat_s": 0.9}, "at most half"),
        ({"min_replicas": 3, "max_replicas": 2}, "no number of members fits"),
        ({"min_replicas": 5, "divides": 4}, "no number of members fits"),
        ({"join_timeout_s": -1.0}, "must not be negative"),
        ({"reset_grace_s": 9.0}, "must hold"),
    ],
)
def test_options_that_contradict_each_other_are_refused(values: dict[str, float], words: str) -> None:
    """When they are made, with the values."""
    with pytest.raises(ConfigurationError, match=words):
        Options(**values)  # type: ignore[arg-type]


def test_server_options_are_checked_too() -> None:
    """mTLS without a certificate is not TLS at all."""
    with pytest.raises(ConfigurationError, match="needs a server certificate"):
        ServerOptions(client_ca="ca.pem")


def test_a_goodbye_that_has_arrived_is_read_although_a_write_finds_the_connection_closed() -> None:
    """Replicas finish at once: one leaves and closes while the lighthouse tells it that another has left. On a busy node
    the write came first, and the one that had left was reported as cut off."""
    leave = encode(messages.Leave("done", finished=True))
    told: list[object] = []

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            replica = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        options = SimpleNamespace(max_connections=9, max_frame_bytes=1 << 20, max_hello_bytes=1 << 10)
        service = SimpleNamespace(
            leave=lambda session, *what: told.append(what),
            disconnected=lambda session, peer, clean: told.append("cut"),
        )
        listener = SimpleNamespace(
            options=options,
            open=set(),
            unauthenticated=ConnectionSlots(8),
            let_in=lambda *one: None,
            service=service,
        )
        connection = Connection(listener)  # type: ignore[arg-type]
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        connection._begun, connection._session = True, object()  # type: ignore[assignment]
        connection.deliver(None, b"a notice that the replica does not read any more")
        replica.sendall(encode(messages.Beat(7)) + leave)
        replica.close()
        connection.deliver(None, b"another one")
        while connection in listener.open:
            await asyncio.sleep(0)

    asyncio.run(scene())
    assert told == [("done", True, 0, -1)]
