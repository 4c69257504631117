"""One TCP connection of the lighthouse: first bytes, hello, frames, commands. An asyncio Protocol, on the loop's thread.

The first bytes distinguish our frames (PREAMBLE) from HTTP, which the web server takes over; any other connection is
closed and logged. A client has one chance to send a valid hello. Open files, unauthenticated connections and their log
lines (`FoldedLog`) are bounded. A client's `Command` is looked up by name and answered with a `Result`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import msgspec

from allranks.channel.frames import HEAD, BadFrame, listen, take_frames, tune
from allranks.channel.keys import Credential, Keyring, is_proof, prove
from allranks.channel.server import ConnectionSlots, FoldedLog
from allranks.errors import LighthouseError
from allranks.lighthouse import messages
from allranks.lighthouse.messages import (
    ACK,
    BEAT,
    EMPTY_BEAT,
    PREAMBLE,
    QUORUM,
    Command,
    Result,
    decode,
    encode,
    load,
)
from allranks.lighthouse.options import ServerOptions
from allranks.lighthouse.page import take_snapshot
from allranks.lighthouse.service import Service
from allranks.lighthouse.sessions import Session
from allranks.model.cluster import (
    PROTOCOL_VERSION,
    CollectEvidence,
    NodeReport,
    Presence,
    PublishedIncident,
    Quorum,
)
from allranks.model.parsing import printable

log = logging.getLogger("allranks.lighthouse")


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_files_limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def calm_collector() -> None:
    """Makes the cyclic garbage collector run rarely: with ten thousand sessions a full run delays clients."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def carry_out(service: Service, command: Command, reply: Callable[[Result], None]) -> None:
    """Runs an authenticated client's command and replies; what must survive this lighthouse is saved before the reply."""
    result = _answer(service, command)
    if command.action in ("evict", "let_in", "finish"):
        service.coordinator.after_kept(lambda: reply(result))
    else:
        reply(result)


def _answer(service: Service, command: Command) -> Result:
    act = _ACTIONS.get(command.action)
    if act is None or (command.action in _OF_A_REPLICA and not command.replica):
        why = "" if command.replica else " without a replica"
        return Result(command.id, False, f"cannot do {command.action!r}" + why)
    try:
        found = act(service, replace(command, reason=printable(command.reason)))
    except (BadFrame, LighthouseError) as error:
        return Result(command.id, False, str(error))
    return Result(command.id, True, msgspec.json.encode(found).decode())


def _evict(service: Service, command: Command) -> object:
    service.evict(command.replica, command.reason or "requested")
    return {"evicted": command.replica}


def _let_in(service: Service, command: Command) -> object:
    if not service.let_in(command.replica):
        raise LighthouseError(f"{command.replica} is not evicted, in back-off or too late")
    return {"let_in": command.replica}


def _report_incident(service: Service, command: Command) -> object:
    service.agents.report_incident(_cleaned(load(PublishedIncident, command.body.encode())))
    return {}


def _note_report(service: Service, command: Command) -> object:
    report = load(NodeReport, command.body.encode())
    places = tuple(printable(text, 200) for text in report.places)
    return service.agents.ranks.note(
        replace(report, node=printable(report.node), places=places), service.now()
    )


_ACTIONS: dict[str, Callable[[Service, Command], object]] = {
    "status": lambda service, command: take_snapshot(service),
    "evict": _evict,
    "let_in": _let_in,
    "finish": lambda service, command: {"finished": service.finish(command.replica)},
    "gather": lambda service, command: service.agents.gather(load(CollectEvidence, command.body.encode())),
    "present": lambda service, command: service.agents.nodes.note(load(Presence, command.body.encode())),
    "report": _note_report,
    "presence": lambda service, command: {"node": service.agents.nodes.find(command.replica)},
    "collect": lambda service, command: {
        "incident": service.agents.collect(command.reason, command.replicas)
    },
    "accuse": lambda service, command: {"lost": service.accuse(command.replica, command.reason)},
    "incident": _report_incident,
}
_OF_A_REPLICA = frozenset({"evict", "let_in", "finish", "presence", "accuse"})


def _cleaned(incident: PublishedIncident) -> PublishedIncident:
    """Removes control characters: the incident is shown on the page and in terminals."""
    texts: dict[str, Any] = {
        name: printable(value)
        for name, value in vars(incident).items()
        if isinstance(value, str) and name not in ("story", "evidence")  # HTML, shown in a sandbox; JSON
    }
    return replace(incident, **texts, replicas=tuple(map(printable, incident.replicas)))


HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"DELE", b"OPTI", b"PATC")  # first bytes of a request
_HTTP2 = b"PRI "
BACKLOG = 4096
_WRITE_LIMIT = 8 << 20  # unread bytes of a client; with more it is disconnected


class _FastBeat(msgspec.Struct, gc=False):
    """messages.Beat for the hot path: a struct is decoded ten times faster than a frozen dataclass."""

    step: int = -1
    progress: int = -1
    idle_s: float = 0.0
    health: str = ""
    ping: bool = False


class _FastAck(msgspec.Struct, gc=False):
    """messages.Ack, likewise."""

    id: int


_HEAD_BYTES, _head = HEAD.size, HEAD.unpack_from
_read_beat = cast("Callable[[bytes], messages.Beat]", msgspec.json.Decoder(_FastBeat).decode)
_read_ack = msgspec.json.Decoder(_FastAck).decode


#: Takes a connection over: its transport, and the bytes that have arrived.
Taker = Callable[[asyncio.Transport, bytes], None]


class UnauthenticatedConnection(Protocol):
    """A connection before its hello."""

    def refuse_quietly(self, why: str) -> None: ...


@dataclass
class Listener:
    """What all connections of one listener share."""

    service: Service
    options: ServerOptions
    takers: dict[bytes, Taker] = field(default_factory=dict)  # first four bytes -> another protocol
    frames: bool = True  # our own protocol is served here
    unauthenticated: ConnectionSlots[UnauthenticatedConnection] = field(init=False)
    open: set[Connection] = field(default_factory=set)
    throttle: FoldedLog = field(default_factory=lambda: FoldedLog(log, 1.0))
    credential: Credential = field(init=False)

    def __post_init__(self) -> None:
        # leaves descriptors for members
        self.unauthenticated = ConnectionSlots(min(self.options.max_unauthenticated, open_files_limit() // 4))
        self.credential = Keyring(self.options.token).for_purpose(messages.PURPOSE)

    async def listen_too(self, takers: dict[bytes, Taker], host: str, port: int) -> asyncio.Server:
        """Opens another port for the page and other protocols, with the same limits; without TLS and our own frames."""
        other = replace(self, takers={**self.takers, **takers}, frames=False)
        other.unauthenticated = self.unauthenticated
        return await serve_at(lambda: Connection(other), host, port)

    def let_in(self, connection: UnauthenticatedConnection, peer: Sequence[object]) -> None:
        """Adds an unauthenticated connection; beyond the limit, closes the oldest of the host that has the most."""
        until = self.service.clock() + self.options.hello_timeout_s
        surplus = self.unauthenticated.add(connection, str(peer[0]) if peer else "", until)
        if surplus is not None:
            surplus.refuse_quietly("too many connections that did not authenticate")

    def drop_slow(self) -> None:
        """Closes connections that did not authenticate in time."""
        for late in self.unauthenticated.late(self.service.clock()):
            late.refuse_quietly("did not authenticate in time")


async def serve_at(make: Callable[[], asyncio.Protocol], host: str, port: int) -> asyncio.Server:
    """Listens there. With asyncio "::" means IPv6 only; a name may have several addresses."""
    loop = asyncio.get_running_loop()
    if host in ("::", "127.0.0.1"):
        return await loop.create_server(make, sock=listen(host, port, BACKLOG), backlog=BACKLOG)
    return await loop.create_server(make, host, port, backlog=BACKLOG, reuse_address=True)


def hand_over(transport: asyncio.Transport, protocol: asyncio.Protocol, data: bytes) -> None:
    """Hands a connection on which `data` has arrived to another protocol."""
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    protocol.data_received(data)


class Connection(asyncio.Protocol):
    """See the module. Implements sessions.Peer."""

    __slots__ = ("_begun", "_buffer", "_greeting", "_listener", "_session", "_transport", "address")
    _transport: asyncio.Transport  # from connection_made on, which comes first

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._session: Session | None = None
        self._buffer = bytearray()  # received bytes of an incomplete frame
        self._begun = False  # the client has sent the preamble
        self._greeting: tuple[messages.Hello, bytes, bytes] | None = None  # the hello, its bytes, our nonce
        self.address = ""

    # ---- asyncio ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        listener = self._listener
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "?"
        if len(listener.open) >= listener.options.max_connections:
            listener.throttle.warn("full", "refused: %d connections are open already", len(listener.open))
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_WRITE_LIMIT)
        listener.open.add(self)
        listener.let_in(self, peer)

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session is not None:
            service = self._listener.service
            session.heard = service.clock() - service.awake.slept_s
            if not self._buffer:  # most reads are exactly one heartbeat
                if data == EMPTY_BEAT:
                    return
                if len(data) > _HEAD_BYTES and _head(data) == (len(data) - _HEAD_BYTES, BEAT):
                    self._beat(session, data[_HEAD_BYTES:])
                    return
        self._buffer += data
        try:
            self._take()
        except BadFrame as error:
            self._refuse(messages.Refused("garbage", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.unauthenticated.remove(self)
        self._listener.open.discard(self)
        if error is not None:
            self._read_shutdown_message()
        session, self._session = self._session, None
        if session is not None:
            self._listener.service.disconnected(session, self, clean=error is None)

    def pause_writing(self) -> None:
        self._listener.throttle.warn("slow", "%s does not read: disconnected", self.address)
        self._transport.abort()

    # ---- sessions.Peer ----------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        self.deliver(message, encode(message))

    def deliver(self, message: object, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Ends the connection once everything written has been sent."""
        self._transport.close()

    def refuse_quietly(self, why: str) -> None:
        self._listener.unauthenticated.remove(self)
        self._listener.throttle.warn(why, "%s %s: closed", self.address, why)
        self._transport.abort()

    def _read_shutdown_message(self) -> None:
        """Reads what had arrived: a write to a closed connection ends it before a replica's Leave is read."""
        if self._session is None or self._transport.get_extra_info("sslcontext"):
            return
        data = self._buffer
        with contextlib.suppress(OSError):
            data += os.read(self._transport.get_extra_info("socket").fileno(), 1 << 16)
        with contextlib.suppress(BadFrame):
            for kind, payload in take_frames(data, self._listener.options.max_frame_bytes):
                if kind == messages.LEAVE:
                    self._frame(kind, payload)

    def _take(self) -> None:
        """Handles all complete frames."""
        listener, options = self._listener, self._listener.options
        if not self._begun:
            if len(self._buffer) < len(PREAMBLE):
                return
            if not self._buffer.startswith(PREAMBLE) or not listener.frames:
                self._other_protocol(bytes(self._buffer))
                return
            del self._buffer[: len(PREAMBLE)]
            self._begun = True
        limit = options.max_frame_bytes if self._session else options.max_hello_bytes
        for kind, payload in take_frames(self._buffer, limit):
            if self._transport.is_closing():
                return
            self._frame(kind, payload)

    def _frame(self, kind: int, payload: bytes) -> None:
        session = self._session
        if session is not None and kind == BEAT:
            if payload:
                self._beat(session, payload)
            return
        if session is not None and kind == ACK:
            try:
                session.pending.pop(_read_ack(payload).id, None)
            except (ValueError, RecursionError) as error:
                raise BadFrame(f"Ack: {error}") from error
            return
        if kind & 0x7F == QUORUM and session is not None and not self._listener.service.state.needs_recall:
            return  # another member was faster; with thousands of members, decoding all quorums would take seconds
        options = self._listener.options  # before authentication nothing may unpack to more than a hello
        message, _ = decode(kind, payload, options.max_frame_bytes if session else options.max_hello_bytes)
        if session is None:
            self._greet(message, payload)
        else:
            self._message(session, message)

    def _beat(self, session: Session, payload: bytes) -> None:
        try:
            beat = _read_beat(payload)
        except (ValueError, RecursionError) as error:
            self._refuse(messages.Refused("garbage", f"Beat: {error}"))
            return
        self._listener.service.beat(session, beat)

    def _greet(self, message: object, payload: bytes) -> None:
        """Takes a hello, then the proof that the client knows the job token; nothing else is accepted before."""
        if self._greeting is not None:
            self._prove(message, *self._greeting)
            return
        if not isinstance(message, messages.Hello):
            raise BadFrame(f"expected a Hello, got {type(message).__name__}")
        if message.version != PROTOCOL_VERSION:
            ours = f"this lighthouse speaks version {PROTOCOL_VERSION}, the client {message.version}"
            refused = messages.Refused("version", f"{ours}: install the same allranks on both sides")
            self._refuse(refused, printable(message.replica)[:64])
            return
        nonce = os.urandom(16).hex()
        self._greeting = (message, payload, nonce.encode())
        self._send(messages.Challenge(nonce))

    def _prove(self, message: object, hello: messages.Hello, hello_bytes: bytes, nonce: bytes) -> None:
        if not isinstance(message, messages.Proof):
            raise BadFrame(f"expected a Proof, got {type(message).__name__}")
        listener = self._listener
        if listener.options.token and not is_proof(
            message.proof, listener.credential, b"client", nonce, hello_bytes
        ):
            why = "the job token is wrong" if message.proof else "no job token"
            self._refuse(messages.Refused("token", why))
            return
        self._send(messages.Proof(prove(listener.credential, b"server", nonce, hello_bytes).hex()))
        self._greeting = None
        entered = listener.service.hello(self, hello)
        if isinstance(entered, messages.Refused):
            self._refuse(entered)
            return
        self._listener.unauthenticated.remove(self)
        self._session = entered
        self._tune()

    def _tune(self) -> None:
        """Only after authentication: thousands of connections may come at once."""
        tune(self._transport.get_extra_info("socket"), self._listener.service.options.heartbeat_timeout_s)

    def _message(self, session: Session, message: object) -> None:
        service = self._listener.service
        if isinstance(message, messages.Join):
            refused = service.join(session, message.member, message.known, message.patience_s)
            if refused is not None:
                self._send(refused)
            elif message.unreached or message.unserved:
                service.note_failures(session, message.unreached, message.unserved)
        elif isinstance(message, messages.Withdraw):
            self._send(service.withdraw(session))
        elif isinstance(message, messages.Leave):
            self._session = None
            service.leave(session, printable(message.reason), message.finished, message.term, message.step)
            self.close()
        elif isinstance(message, messages.Died):
            self._session = None
            service.accuse(session.replica, printable(message.reason), message.stopped)
        elif isinstance(message, Quorum):
            service.recalled(message)
        elif isinstance(message, messages.Probed):
            service.probed(session, message)
        elif isinstance(message, messages.Command):
            carry_out(service, message, self._send)
        else:
            raise BadFrame(f"{type(message).__name__} is not for the lighthouse")

    def _refuse(self, refused: messages.Refused, claimed: str = "") -> None:
        """`claimed`: the name that the client gave without proving it."""
        sender = f"{self.address} (it calls itself {claimed!r})" if claimed else self.address
        self._listener.throttle.warn(
            refused.code, "%s refused (%s): %s", sender, refused.code, refused.message
        )
        self._listener.unauthenticated.remove(self)
        self._send(refused)
        self.close()

    def _other_protocol(self, data: bytes) -> None:
        listener, start = self._listener, data[:4]
        if start not in listener.takers:
            if start == PREAMBLE:
                raise BadFrame("this port is for torchft's clients: use the lighthouse's own")
            what = "gRPC: torchft's clients need --grpc-bind" if start == _HTTP2 else f"{data[:16]!r}"
            raise BadFrame(f"neither our frames nor HTTP: {what}")
        listener.unauthenticated.remove(self)
        listener.open.discard(self)
        if start not in HTTP:
            self._tune()
        listener.takers[start](self._transport, data)
