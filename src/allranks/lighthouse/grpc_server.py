"""torchft's own gRPC protocol beside ours: unmodified torchft clients form quorums on this lighthouse.

Runs in the lighthouse, on its loop; needs the extra [grpc]. A torchft replica is a session like any other: its
heartbeats are signs of life, its closed connection is a death notice at once (torchft's own lighthouse waits
for 5 s of silence). torchft knows no token, so this door lets in whoever reaches it: bind it with care.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from allranks.channel.frames import join_address
from allranks.errors import require
from allranks.lighthouse.connection import Listener, Taker
from allranks.lighthouse.grpc_relay import PREFACE, Relay
from allranks.lighthouse.grpc_wire import (
    BadMessage,
    decode_heartbeat_request,
    decode_quorum_request,
    encode_quorum_response,
)
from allranks.lighthouse.messages import Hello, Refused
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import Quorum

log = logging.getLogger("allranks.lighthouse")

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 100),  # of one connection; torchft has two calls open at a time
    ("grpc.max_metadata_size", 4 << 10),
    ("grpc.absolute_max_metadata_size", 4 << 10),
)
MAX_CONNECTIONS_EACH = 4  # of a replica: torchft has two, its manager's and its heartbeats'
MAX_REPLICAS = 2048  # torchft's protocol has no token: whoever comes may say any number of names


class CallContext(Protocol):
    """The part of gRPC's context that is used here."""

    def peer(self) -> str: ...
    async def abort(self, code: object, details: str) -> NoReturn: ...


@dataclass(eq=False)
class GrpcPeer:
    """A torchft replica as the service sees it. `waiting` are its pending Quorum calls."""

    address: str
    session: Session | None = None
    waiting: list[asyncio.Future[Quorum]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)  # connections on which it was seen

    def deliver(self, message: object, frame: bytes) -> None:
        """Answers pending calls; notices have no place in torchft's protocol and count as received."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            if call.done():
                continue
            if isinstance(message, Quorum):
                call.set_result(message)
            elif isinstance(message, Refused):
                call.set_exception(ConnectionRefusedError(message.message))
            else:
                self.waiting.append(call)
        if self.session is not None:
            self.session.pending.clear()

    def close(self) -> None:
        """Ends pending calls."""
        for call in self.waiting:
            if not call.done():
                call.set_exception(ConnectionResetError("the lighthouse is closing"))
        self.waiting.clear()


@dataclass
class TorchftServer:
    """The two calls of torchft's LighthouseService."""

    service: Service
    peers: dict[str, GrpcPeer] = field(default_factory=dict)
    relay: Relay | None = None

    async def quorum(self, request: bytes, context: CallContext) -> bytes:
        """Long poll: answers when a quorum with this member is formed."""
        import grpc

        try:
            member = decode_quorum_request(request)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        peer = self._peer(member.replica, context)
        if isinstance(peer, Refused):
            await context.abort(grpc.StatusCode.UNAVAILABLE, peer.message)
        call: asyncio.Future[Quorum] = asyncio.get_running_loop().create_future()
        peer.waiting.append(call)
        session = peer.session
        assert session is not None
        refused = self.service.join(session, member)
        if refused is not None:
            peer.waiting.remove(call)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refused.message)
        try:
            return encode_quorum_response(await self._answer(call, session), time.time())
        except asyncio.CancelledError:
            if call in peer.waiting:
                peer.waiting.remove(call)
                self.service.withdraw(session)
            raise
        except ConnectionError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _answer(self, call: asyncio.Future[Quorum], session: Session) -> Quorum:
        """Waits for the quorum. Asking is a sign of life, for as long as the call is open."""
        while not call.done():
            self.service.heard(session)
            await asyncio.wait((call,), timeout=self.service.options.beat_s / 2)
        return call.result()

    async def heartbeat(self, request: bytes, context: CallContext) -> bytes:
        """A sign of life."""
        import grpc

        try:
            name = decode_heartbeat_request(request)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        peer = self._peer(name, context)
        if isinstance(peer, GrpcPeer) and peer.session is not None:
            self.service.heard(peer.session)
        return b""

    def closed(self, port: int) -> None:
        """A connection ended: replicas that were seen on no other one are gone."""
        for name, peer in list(self.peers.items()):
            if port not in peer.ports:
                continue
            peer.ports.discard(port)
            if not peer.ports:
                del self.peers[name]
                peer.close()
                if peer.session is not None:
                    self.service.disconnected(peer.session, peer, clean=True)

    def _peer(self, name: str, context: CallContext) -> GrpcPeer | Refused:
        """The replica's peer; says hello to the service when it is new or was declared lost."""
        port = int(context.peer().rsplit(":", 1)[1])
        address = "?"
        if self.relay is not None:
            self.relay.heard(port)
            address = self.relay.address(port)
        peer = self.peers.pop(name, None)
        if peer is None and len(self.peers) >= MAX_REPLICAS:
            return Refused("full", f"{MAX_REPLICAS} replicas are here already")
        peer = peer or GrpcPeer(address)
        if any(session.session != name for session in self.service.sessions.of(name)):
            return Refused("taken", f"{name} has proved its name: nobody without a token takes its place")
        known = self.service.sessions.get(name, 0)
        if peer.session is None or known is not peer.session:
            node = address.rsplit(":", 1)[0]
            answer = self.service.hello(peer, Hello(replica=name, session=name, node=node))
            if isinstance(answer, Refused):
                return answer
            peer.session = answer
        self.peers[name] = peer
        if len(peer.ports) < MAX_CONNECTIONS_EACH:
            peer.ports.add(port)
            if self.relay is not None:
                self.relay.keep(port)
        return peer


def grpc_door(
    host: str, port: int, listening: Callable[[str], None] = lambda address: None
) -> Callable[[Listener], contextlib.AbstractAsyncContextManager[None]]:
    """What `Lighthouse(doors=…)` takes; `listening` is called with the address, "http://host:port". Host "" means the
    lighthouse's own port. Another port serves the page too, but none of our own frames."""
    require("grpc", feature="torchft's protocol", extra="grpc")

    @asynccontextmanager
    async def open_door(listener: Listener) -> AsyncIterator[None]:
        torchft = TorchftServer(listener.service)
        server, inner = _grpc_server(torchft)
        await server.start()
        torchft.relay = Relay(("127.0.0.1", inner), torchft.closed, listener.max_strangers // 2)
        takers: dict[bytes, Taker] = {PREFACE: torchft.relay.take}
        address, own = listener.service.address, None
        if host:
            own = await listener.listen_too(takers, host, port)
            address = join_address(*own.sockets[0].getsockname()[:2])
        else:
            listener.takers.update(takers)
        log.info("torchft's protocol on %s", address)
        listening(f"http://{address}")
        try:
            yield
        finally:
            if own is not None:
                own.close()
            for peer in torchft.peers.values():
                peer.close()
            await torchft.relay.close()
            await server.stop(grace=0.5)

    return open_door


def _grpc_server(torchft: TorchftServer) -> tuple[Any, int]:
    """gRPC's own server, on a loopback port."""
    import grpc

    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Quorum": grpc.unary_unary_rpc_method_handler(torchft.quorum),
        "Heartbeat": grpc.unary_unary_rpc_method_handler(torchft.heartbeat),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("torchft.LighthouseService", handlers),)
    )
    return server, server.add_insecure_port("127.0.0.1:0")
