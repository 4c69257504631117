"""The port for torchft's clients: its bytes, its limits, and who may say what on it."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.lighthouse import state, training
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.connection import Listener
from allranks.lighthouse.grpc_server import (
    CALL_BYTES,
    MAX_REPLICAS,
    PREFACE,
    GrpcPeer,
    Relay,
    TorchftServer,
    torchft_protocol,
)
from allranks.lighthouse.grpc_wire import (
    BadMessage,
    decode_heartbeat_request,
    decode_member,
    decode_quorum_request,
    encode_member,
    encode_quorum_request,
    encode_quorum_response,
)
from allranks.lighthouse.messages import PREAMBLE, Hello, encode
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.lighthouse.service import Service
from allranks.model.cluster import Member, Quorum

from .waiting import eventually

members = st.builds(
    Member,
    replica=st.text(max_size=20), address=st.text(max_size=20), store=st.text(max_size=20), data=st.text(max_size=20),
    step=st.integers(-(2**63), 2**63 - 1), world_size=st.integers(0, 2**63 - 1), shrink_only=st.booleans(),
    commit_failures=st.integers(0, 2**31 - 1),
)  # fmt: skip


@given(members)
@settings(max_examples=200)
def test_members_survive_the_wire(member: Member) -> None:
    """Written and read back, torchft's fields are the same."""
    back = decode_member(encode_member(member))
    for name in (
        "replica",
        "address",
        "store",
        "data",
        "step",
        "world_size",
        "shrink_only",
        "commit_failures",
    ):
        assert getattr(back, name) == getattr(member, name)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    """Every answer is a value or BadMessage."""
    for decode in (decode_quorum_request, decode_heartbeat_request, decode_member):
        try:
            decode(data)
        except BadMessage:
            pass


def test_a_quorum_has_the_bytes_that_torchft_expects() -> None:
    """Known bytes: quorum 3 of one member, with a timestamp."""
    quorum = Quorum(3, 1, (Member(replica="a", step=5),))
    assert (
        encode_quorum_response(quorum, 2.5).hex()
        == "0a1508031207" + "0a0161" + "2005" + "2801" + "1a08" + "0802" + "1080cab5ee01"
    )


def test_connections_to_torchfts_port_that_call_nothing_are_bounded() -> None:
    """Of those that say nothing, or only that they speak HTTP/2, the oldest is closed; a member's stays."""

    async def play() -> None:
        closed: list[int] = []
        ports: asyncio.Queue[int] = asyncio.Queue()

        async def inner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ports.put_nowait(writer.get_extra_info("peername")[1])
            while data := await reader.read(100):
                writer.write(data)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(inner, "127.0.0.1", 0)
        listener = Listener(
            Service(Options(), asyncio.get_running_loop()), replace(ServerOptions(), max_unauthenticated=8)
        )
        relay = Relay(server.sockets[0].getsockname()[:2], closed.append, 8)
        outer = await listener.listen_too({PREFACE: relay.take}, "127.0.0.1", 0)
        where = outer.sockets[0].getsockname()[:2]

        silent = [await asyncio.open_connection(*where) for _ in range(9)]
        assert await silent[0][0].read() == b""

        lines = []
        for number in range(10):
            reader, writer = await asyncio.open_connection(*where)
            writer.write(PREFACE)
            assert await reader.readexactly(4) == PREFACE
            lines.append((reader, writer))
            port = await ports.get()
            if number == 0:
                assert relay.address(port).startswith("127.0.0.1:")
                relay.keep(port)  # the member's
        assert await lines[1][0].read() == b"" and len(closed) == 1
        lines[0][1].write(b"more")
        assert await lines[0][0].readexactly(4) == b"more"
        for _, writer in [*silent, *lines]:
            writer.close()
        await relay.close()
        outer.close()
        server.close()

    asyncio.run(asyncio.wait_for(play(), 120))


@pytest.mark.usefixtures("grpc_poller")
def test_headers_without_end_are_cut_off_at_torchfts_port() -> None:
    """HTTP/2 lets a client go on with the headers of one call for ever, and gRPC keeps them."""
    frame = lambda kind, body: len(body).to_bytes(3, "big") + bytes([kind, 0]) + b"\0\0\0\1" + body  # noqa: E731
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + frame(1, b"\0\1a\1b")
    with ExitStack() as stack:
        where: list[str] = []
        protocol = torchft_protocol("127.0.0.1", 0, where.append)
        stack.enter_context(Lighthouse(Options(), ServerOptions(token="t"), protocols=(protocol,)))
        host, port = where[0].removeprefix("http://").split(":")
        sock = stack.enter_context(socket.create_connection((host, int(port)), 20))
        sock.sendall(start)
        sent = 0
        with pytest.raises(OSError):
            while sent < 16 << 20:
                sent += sock.send(frame(9, (b"\0\1a\x64" + bytes(100)) * 100))
        assert sent < 16 << 20


@pytest.mark.usefixtures("grpc_poller")
def test_a_torchft_client_may_call_without_end() -> None:
    """Its connection sends more than an unknown client's may, call by call."""
    import grpc

    with ExitStack() as stack:
        where: list[str] = []
        protocol = torchft_protocol("127.0.0.1", 0, where.append)
        stack.enter_context(Lighthouse(Options(), ServerOptions(), protocols=(protocol,)))
        channel = stack.enter_context(grpc.insecure_channel(where[0].removeprefix("http://")))
        beat = channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        for _ in range(2 * CALL_BYTES // 240):
            beat(_heartbeat("n" * 240), timeout=20)


@pytest.mark.usefixtures("grpc_poller")
@pytest.mark.parametrize("opened", [False, True])
def test_without_the_token_a_torchft_client_is_never_a_member(opened: bool) -> None:
    """A call that claims a step reaches nobody; with --grpc-open a heartbeat is an observer's; with the token both work."""
    import grpc

    with ExitStack() as stack:
        where: list[str] = []
        protocol = torchft_protocol("127.0.0.1", 0, where.append, open_to_observers=opened)
        lighthouse = stack.enter_context(
            Lighthouse(Options(), ServerOptions(token="t"), protocols=(protocol,))
        )
        member = stack.enter_context(
            Client(ClientOptions(addresses=(lighthouse.address,), token="t", replica="a"))
        )
        assert member.join(Member("a", step=5), 30).names == ("a",)
        channel = stack.enter_context(grpc.insecure_channel(where[0].removeprefix("http://")))
        quorum = channel.unary_unary("/torchft.LighthouseService/Quorum")
        beat = channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        request = encode_quorum_request(Member("x", step=1_000_000))
        with pytest.raises(grpc.RpcError, match="--no-token") as caught:
            quorum(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        if opened:
            beat(_heartbeat("x"), timeout=20)
            assert [r["state"] for r in member.status()["replicas"] if r["replica"] == "x"] == ["observer"]
        else:
            with pytest.raises(grpc.RpcError, match="--grpc-open"):
                beat(_heartbeat("x"), timeout=20)
        token = (("authorization", "Bearer t"),)
        beat(_heartbeat("y"), timeout=20, metadata=token)
        assert [r["state"] for r in member.status()["replicas"] if r["replica"] == "y"] == ["connected"]


@pytest.mark.usefixtures("grpc_poller")
def test_torchfts_clients_and_managers_never_share_a_quorum() -> None:
    """Without a token: a member whose text is not a claim stays out, whatever step it says; who trains continues."""
    import grpc

    claim = '{"ranks": [{"step": 5}]}'
    with ExitStack() as stack:
        where: list[str] = []
        protocol = torchft_protocol("127.0.0.1", 0, where.append)
        lighthouse = stack.enter_context(Lighthouse(Options(), ServerOptions(), protocols=(protocol,)))
        member = stack.enter_context(Client(ClientOptions((lighthouse.address,), replica="a")))
        own = Member("a", step=5, data=claim, dialect="manager")
        assert member.join(own, 30).names == ("a",)
        channel = stack.enter_context(grpc.insecure_channel(where[0].removeprefix("http://")))
        quorum = channel.unary_unary("/torchft.LighthouseService/Quorum")
        request = encode_quorum_request(Member("x", step=1_000_000, data="not JSON"))

        def wait_for_a_quorum() -> None:
            with pytest.raises(grpc.RpcError, match="Deadline"):
                quorum(request, timeout=3)

        waiting = threading.Thread(target=wait_for_a_quorum)
        waiting.start()
        eventually(lambda: "x" in member.status()["waiting"])
        assert member.join(own, 30).names == ("a",)
        assert member.status()["number"] == 1
        waiting.join(30)


@dataclass
class Caller:
    """gRPC's view of a client."""

    port: int = 5

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self.port}"

    async def abort(self, code: object, details: str) -> NoReturn:
        raise ConnectionRefusedError(details)


def test_names_without_end_fill_no_memory() -> None:
    """torchft's protocol has no token: names that are too long or too many are not kept; known ones go on."""

    async def play() -> None:
        service = Service(Options(), asyncio.get_running_loop())
        server = TorchftServer(service)
        for name in ("x" * 300, "a\x1b[31m"):
            await server.heartbeat(_heartbeat(name), Caller())
            assert not server.peers and not service.state.replicas
            with pytest.raises(ConnectionRefusedError, match="printable"):
                await server.quorum(encode_quorum_request(Member(name)), Caller())
        for number in range(MAX_REPLICAS + 10):
            await server.heartbeat(_heartbeat(f"r{number}"), Caller())
        assert len(server.peers) == len(service.state.replicas) == MAX_REPLICAS
        with pytest.raises(ConnectionRefusedError, match=f"{MAX_REPLICAS} replicas are connected already"):
            await server.quorum(encode_quorum_request(Member("one more")), Caller())
        for port in range(5, 50):
            await server.heartbeat(_heartbeat("r0"), Caller(port))
        assert server.peers["r0"].ports == {5, 6, 7, 8}  # the others may be closed when too many are there
        service.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_names_that_come_and_go_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes and goes all the time costs no more than a few numbers."""
    monkeypatch.setattr(training, "MAX_DEPARTED", 50)
    monkeypatch.setattr(state, "MAX_LOSERS", 50)

    async def play() -> None:
        service = Service(Options(), asyncio.get_running_loop())
        server, view = TorchftServer(service), service.training
        for number in range(400):
            await server.heartbeat(_heartbeat(f"r{number}" if number % 2 else "again"), Caller())
            server.closed(5)
            service._lose(f"r{number}" if number % 2 else "again", "gone", certain=True)
        books = (service.state.losses, view.departed, view._left_at, view._disconnected)
        assert all(0 < len(book) <= 50 for book in books), [len(book) for book in books]
        assert max(map(len, service.state.losses.values())) < 100
        service.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_nobody_takes_the_place_of_a_member_with_a_token_at_torchfts_port() -> None:
    """Neither a heartbeat nor a join in its name ends its session; without it the name is free."""

    async def play() -> None:
        service = Service(Options(), asyncio.get_running_loop())
        server, member = TorchftServer(service), GrpcPeer("10.0.0.1:1")
        session = service.hello(member, Hello(replica="a", session="secret of a"))
        await server.heartbeat(_heartbeat("a"), Caller())
        with pytest.raises(ConnectionRefusedError, match="a has authenticated"):
            await server.quorum(encode_quorum_request(Member("a")), Caller())
        assert service.sessions.get("a", 0) is session and not server.peers
        await server.heartbeat(_heartbeat("b"), Caller())
        await server.heartbeat(_heartbeat("b"), Caller())
        assert set(server.peers) == {"b"}
        service.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def _heartbeat(name: str) -> bytes:
    """Field 1: the replica's name."""
    data = name.encode()
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    return b"\x0a" + size + data


def test_torchfts_port_speaks_none_of_our_frames() -> None:
    """It may be open where ours needs a client certificate."""

    async def play() -> None:
        listener = Listener(Service(Options(), asyncio.get_running_loop()), ServerOptions(token="t"))
        outer = await listener.listen_too({}, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*outer.sockets[0].getsockname()[:2])
        writer.write(PREAMBLE + encode(Hello()))
        answer = await reader.read()
        assert b"this port is for torchft's clients" in answer
        writer.close()
        outer.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_torchfts_port_everywhere_means_ipv4_and_ipv6() -> None:
    """[::] is torchft's default."""

    async def play() -> None:
        listener = Listener(Service(Options(), asyncio.get_running_loop()), ServerOptions())
        outer = await listener.listen_too({}, "::", 0)
        port = outer.sockets[0].getsockname()[1]
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        outer.close()

    asyncio.run(asyncio.wait_for(play(), 60))
