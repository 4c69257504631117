"""torchft's gRPC protocol: unmodified torchft clients form quorums on this lighthouse.

Runs in the lighthouse, on its loop; needs the extra [grpc]. A torchft replica is a session like any other: its closed
connection means death at once (torchft's own lighthouse waits for 5 s of silence). torchft's clients have no token:
where the lighthouse has one, a call needs it in its metadata ("authorization: Bearer TOKEN"); with `open_to_observers`
calls without it may send heartbeats only.

gRPC does not notify a server of a client that disconnects between two calls. So a `Relay` takes connections that begin
like HTTP/2, passes their bytes to the real server on loopback, and reports the local port of each that closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from allranks.channel.frames import join_address, loopback
from allranks.channel.server import ConnectionSlots
from allranks.errors import require
from allranks.lighthouse import grpc_wire
from allranks.lighthouse.connection import Listener, Taker, hand_over, open_files_limit
from allranks.lighthouse.messages import Hello, Refused
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import Quorum

try:
    import grpc
except ImportError:  # torchft_protocol says what to install
    grpc = None

T = TypeVar("T")
CHUNK = 1 << 16
CALL_BYTES = 64 << 10  # a connection may send this between two calls: four times the largest call
IDLE_BYTES_S = 100.0  # and this much more each second, for the keep-alive of a call that waits for hours
PREFACE = b"PRI "  # first bytes of HTTP/2


class Relay:
    """Calls `closed(port)` once per connection; the gRPC server sees `port` as the peer's.

    A connection costs two descriptors. At most `max_idle` connections belong to no member; all together use at most
    half of this process' descriptors.
    """

    def __init__(self, grpc: tuple[str, int], closed: Callable[[int], None], max_idle: int) -> None:
        self._grpc = grpc
        self._closed = closed
        self._max = open_files_limit() // 4
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = ConnectionSlots[asyncio.Task[None]](max_idle)  # of no member
        self._ports: dict[int, tuple[asyncio.Task[None], str]] = {}
        self._left: dict[int, float] = {}  # bytes that a connection may send before its next call

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Takes over a connection that was accepted elsewhere and has sent `first`."""
        hand_over(transport, asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve), first)

    def address(self, port: int) -> str:
        """The client's real address."""
        return self._ports[port][1] if port in self._ports else "?"

    def heard(self, port: int) -> None:
        """A complete call has arrived from this port."""
        if port in self._left:
            self._left[port] = CALL_BYTES

    def keep(self, port: int) -> None:
        """The connection of this port belongs to a member."""
        if port in self._ports:
            self._idle.remove(self._ports[port][0])

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._max:
            writer.close()
            return
        self._tasks.add(task)
        peer = writer.get_extra_info("peername")
        surplus = self._idle.add(task, str(peer[0]) if peer else "")
        if surplus is not None:
            self._idle.remove(surplus)
            surplus.cancel()
        try:
            await self._relay(task, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the client closed it, too many are idle, or we close
        finally:
            self._tasks.discard(task)
            self._idle.remove(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _relay(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(*self._grpc)
        port: int = inner_writer.get_extra_info("sockname")[1]
        peer = writer.get_extra_info("peername")
        self._ports[port] = (task, f"{peer[0]}:{peer[1]}" if peer else "?")
        pumps = [
            asyncio.ensure_future(self._take_in(port, reader, inner_writer)),
            asyncio.ensure_future(_pump(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            with contextlib.suppress(OSError, RuntimeError):
                inner_writer.close()
            del self._ports[port]
            self._left.pop(port, None)
            self._closed(port)
            await asyncio.gather(*pumps, return_exceptions=True)  # last: it may be cancelled too

    async def _take_in(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays until the client sends CALL_BYTES without a call: gRPC would buffer headers without limit."""
        clock = asyncio.get_running_loop().time
        self._left[port], at = CALL_BYTES, clock()
        while chunk := await reader.read(CHUNK):
            now = clock()
            self._left[port] = min(CALL_BYTES, self._left[port] + (now - at) * IDLE_BYTES_S) - len(chunk)
            at = now
            if self._left[port] < 0:
                return
            writer.write(chunk)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()


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
MAX_CONNECTIONS_EACH = 4  # of a replica: torchft has two, for its manager and its heartbeats
MAX_REPLICAS = 2048  # clients without a token could invent any number of names


class CallContext(Protocol):
    """The part of gRPC's context that is used here."""

    def peer(self) -> str: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...
    async def abort(self, code: object, details: str) -> NoReturn: ...


@dataclass(eq=False)
class GrpcPeer:
    """A torchft replica as the service sees it. `waiting` holds its pending Quorum calls."""

    address: str
    session: Session | None = None
    waiting: list[asyncio.Future[Quorum]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)  # connections on which it was seen

    def deliver(self, message: object, frame: bytes) -> None:
        """Answers pending calls; torchft's protocol has no notices, so they count as acknowledged."""
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
    token: str = ""  # "": not needed
    open_to_observers: bool = False  # calls without the token may report that a replica lives
    peers: dict[str, GrpcPeer] = field(default_factory=dict)
    relay: Relay | None = None

    async def quorum(self, request: bytes, context: CallContext) -> bytes:
        """Long poll: answers when a quorum with this member is formed."""
        if not self._knows_token(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        member = await _decode(grpc_wire.decode_quorum_request, request, context)
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
            return grpc_wire.encode_quorum_response(await self._answer(call, session), time.time())
        except asyncio.CancelledError:
            if call in peer.waiting:
                peer.waiting.remove(call)
                self.service.withdraw(session)
            raise
        except ConnectionError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _answer(self, call: asyncio.Future[Quorum], session: Session) -> Quorum:
        """Waits for the quorum. An open call counts as a heartbeat."""
        while not call.done():
            self.service.heard(session)
            await asyncio.wait((call,), timeout=self.service.options.beat_s / 2)
        return call.result()

    async def heartbeat(self, request: bytes, context: CallContext) -> bytes:
        known = self._knows_token(context)
        if not known and not self.open_to_observers:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        name = await _decode(grpc_wire.decode_heartbeat_request, request, context)
        peer = self._peer(name, context, observer=not known)
        if isinstance(peer, GrpcPeer) and peer.session is not None:
            self.service.heard(peer.session)
        return b""

    def _knows_token(self, context: CallContext) -> bool:
        if not self.token:
            return True
        values = (value for key, value in context.invocation_metadata() if key == "authorization")
        given = next(values, "")
        given = given if isinstance(given, bytes) else given.encode(errors="replace")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def closed(self, port: int) -> None:
        """A connection ended: replicas that use no other connection are gone."""
        for name, peer in list(self.peers.items()):
            if port not in peer.ports:
                continue
            peer.ports.discard(port)
            if not peer.ports:
                del self.peers[name]
                peer.close()
                if peer.session is not None:
                    self.service.disconnected(peer.session, peer, clean=True)

    def _peer(self, name: str, context: CallContext, observer: bool = False) -> GrpcPeer | Refused:
        """The replica's peer; registers it with the service when it is new or was declared lost."""
        port = int(context.peer().rsplit(":", 1)[1])
        address = "?"
        if self.relay is not None:
            self.relay.heard(port)
            address = self.relay.address(port)
        peer = self.peers.pop(name, None)
        if peer is None and len(self.peers) >= MAX_REPLICAS:
            return Refused("full", f"{MAX_REPLICAS} replicas are connected already")
        peer = peer or GrpcPeer(address)
        if any(session.session != name for session in self.service.sessions.of(name)):
            return Refused("taken", f"{name} has authenticated: a client without a token cannot replace it")
        known = self.service.sessions.get(name, 0)
        if peer.session is None or known is not peer.session:
            node = address.rsplit(":", 1)[0]
            role = "observer" if observer else "replica"
            answer = self.service.hello(peer, Hello(replica=name, session=name, node=node, role=role))
            if isinstance(answer, Refused):
                return answer
            answer.dialect = "torchft"
            peer.session = answer
        self.peers[name] = peer
        if len(peer.ports) < MAX_CONNECTIONS_EACH:
            peer.ports.add(port)
            if self.relay is not None:
                self.relay.keep(port)
        return peer


NO_TOKEN = (
    "this lighthouse has a job token, which torchft's clients cannot send: start it with --no-token for a job of torchft, "
    "or with --grpc-open to take heartbeats only"
)


async def _decode(read: Callable[[bytes], T], request: bytes, context: CallContext) -> T:
    try:
        return read(request)
    except grpc_wire.BadMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def torchft_protocol(
    host: str,
    port: int,
    listening: Callable[[str], None] = lambda address: None,
    open_to_observers: bool = False,
) -> Callable[[Listener], contextlib.AbstractAsyncContextManager[None]]:
    """For `Lighthouse(protocols=…)`; calls `listening` with the address, "http://host:port". Host "" means the
    lighthouse's own port. Another port serves the page too, but not our own frames."""
    require("grpc", feature="torchft's protocol", extra="grpc")

    @asynccontextmanager
    async def serve(listener: Listener) -> AsyncIterator[None]:
        torchft = TorchftServer(listener.service, listener.options.token, open_to_observers)
        server, inner = _grpc_server(torchft)
        await server.start()
        torchft.relay = Relay((loopback(), inner), torchft.closed, listener.unauthenticated.limit // 2)
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

    return serve


def _grpc_server(torchft: TorchftServer) -> tuple[Any, int]:
    """gRPC's own server, on a loopback port."""
    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Quorum": grpc.unary_unary_rpc_method_handler(torchft.quorum),
        "Heartbeat": grpc.unary_unary_rpc_method_handler(torchft.heartbeat),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("torchft.LighthouseService", handlers),)
    )
    return server, server.add_insecure_port(join_address(loopback(), 0))
