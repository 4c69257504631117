"""HTTP/1.1 on the lighthouse's own port: only what its page, API and metrics need. On the loop's thread.

Requests are bounded (head 16 KiB and 100 lines, body 64 KiB, 10 s to arrive); answers are complete or server-sent events.
One request is handled every TURN_S, so members never wait for more than one. A connection gets its next answer after it
has read the previous ones: it never holds more than one answer and UNREAD_BYTES. All connections together hold at most
ALL_UNREAD_BYTES; beyond that the slowest reader is disconnected. When all slots are taken, the host with the most
connections loses its oldest. Routing and JSON are in `web.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

from allranks.channel.server import ConnectionSlots

log = logging.getLogger("allranks.lighthouse")

MAX_HEAD = 16 << 10
MAX_LINES = 100
MAX_BODY = 64 << 10
ARRIVAL_S = 10.0
IDLE_S = 60.0
TURN_S = 0.002
#: duplicates are rejected
_ONCE = frozenset({"content-length", "host", "authorization", "origin"})
UNREAD_BYTES = 64 << 10  # beyond this no further request is read and no event sent
ALL_UNREAD_BYTES = 16 << 20  # the status of a thousand replicas has half a megabyte


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # lower-case names
    body: bytes = b""
    private: bool = True  # sent over TLS, or from this machine


@dataclass(frozen=True)
class Answer:
    """A complete answer; `stream` instead of a body keeps the connection open for events."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    stream: Callable[[EventStream], Callable[[], None]] | None = None  # returns "unsubscribe"
    headers: tuple[tuple[str, str], ...] = ()
    framed: bool = False  # our own page may show it in a frame


class EventStream:
    """Where server-sent events are written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unread_since: float | None = None

    def send(self, data: bytes) -> None:
        """Sends one event unless earlier ones are unread (each is complete); aborts a connection that never reads."""
        transport = self._transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() <= UNREAD_BYTES:
            self._unread_since = None
            for part in (b"data: ", memoryview(data), b"\n\n"):  # large and shared: not copied per connection
                transport.write(part)
            return
        now = asyncio.get_running_loop().time()
        if self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > IDLE_S:
            transport.abort()


@dataclass
class HttpSlots:
    """The open connections and their turns."""

    limit: int
    open: ConnectionSlots[HttpConnection] = field(init=False)
    unread: dict[HttpConnection, int] = field(default_factory=dict)  # bytes, of slow readers
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_turn: float = 0.0

    def __post_init__(self) -> None:
        self.open = ConnectionSlots(self.limit)

    def take(self, connection: HttpConnection, host: str) -> None:
        """Adds a connection; if all slots are taken, aborts the oldest of the host that has the most."""
        if (surplus := self.open.add(connection, host)) is not None:
            surplus.abort()

    async def wait_for_turn(self, transport: asyncio.WriteTransport) -> None:
        """Waits so that one request is handled every TURN_S, in order; a closed connection takes no turn."""
        async with self._turns:
            now = asyncio.get_running_loop().time
            if not transport.is_closing() and (pause := self._last_turn + TURN_S - now()) > 0:
                await asyncio.sleep(pause)
            self._last_turn = now()

    def reads_slowly(self, connection: HttpConnection, size: int) -> None:
        """Records unread bytes; aborts the slowest readers beyond ALL_UNREAD_BYTES."""
        self.unread[connection] = size
        while len(self.unread) > 1 and sum(self.unread.values()) > ALL_UNREAD_BYTES:
            next(iter(self.unread)).abort()

    def free(self, connection: HttpConnection) -> None:
        """Forgets a connection that is closed or about to be."""
        self.unread.pop(connection, None)
        self.open.remove(connection)


class HttpConnection(asyncio.StreamReaderProtocol):
    """One connection; requests are handled one after the other."""

    transport: asyncio.Transport  # from connection_made on, which comes first

    def __init__(self, handle: Callable[[HttpRequest], Answer], slots: HttpSlots) -> None:
        super().__init__(asyncio.StreamReader(limit=MAX_HEAD), _serve)
        self._handle, self._slots = handle, slots
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=UNREAD_BYTES)
        peer = transport.get_extra_info("peername")
        self._slots.take(self, str(peer[0]) if peer else "")
        self._abort_after(ARRIVAL_S)
        super().connection_made(transport)

    def abort(self) -> None:
        """Ends the connection at once and frees its slot."""
        self._slots.free(self)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._slots.free(self)
        self._abort_after(None)
        super().connection_lost(error)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # close: the client reads no answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slots.reads_slowly(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slots.unread.pop(self, None)

    async def answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request, once the last answers are read and its turn has come; whether another may follow."""
        await writer.drain()
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await self._slots.wait_for_turn(self.transport)
            request, length = _parse_head(head[:-4])
        except (ValueError, asyncio.LimitOverrunError) as error:
            return self._refuse(400 if isinstance(error, ValueError) else 431)
        if length > MAX_BODY:
            return self._refuse(413)
        private = request.method != "POST" or _is_private(self.transport)
        request = replace(request, body=await reader.readexactly(length), private=private)
        try:
            answer = self._handle(request)
        except Exception:
            log.exception("%r %r failed", request.method, request.path)
            answer = Answer(500, b'{"error": "internal error, see the log of the lighthouse"}')
        if answer.stream is None or request.method == "HEAD":
            return self._send(request, replace(answer, stream=None))
        self._send(request, answer)
        self._abort_after(None)
        end_stream = answer.stream(EventStream(self.transport))
        try:
            while await reader.read(MAX_HEAD):
                pass  # a subscriber sends nothing more
        finally:
            end_stream()
        return False

    def _send(self, request: HttpRequest, answer: Answer) -> bool:
        """Writes an answer; whether the connection stays open for another request."""
        if self.transport.is_closing():  # while the request waited for its turn
            return False
        keep = request.headers.get("connection", "").lower() != "close" and answer.stream is None
        ancestors = "'self'" if answer.framed else "'none'"
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {answer.kind}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            f"Content-Security-Policy: default-src 'self' 'unsafe-inline'; frame-ancestors {ancestors}",
            *(f"{name}: {value}" for name, value in answer.headers),
        ]
        if answer.stream is None:
            connection = "keep-alive" if keep else "close"
            lines += [f"Content-Length: {len(answer.body)}", f"Connection: {connection}"]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        # one write: writelines() of Python 3.12.0 to 3.13.1 never pauses writing
        self.transport.write(head if request.method == "HEAD" else head + answer.body)
        self._abort_after(IDLE_S)
        return keep

    def _refuse(self, status: int) -> bool:
        body = f'{{"error": "{HTTPStatus(status).phrase}"}}'.encode()
        return self._send(HttpRequest("GET", "", headers={"connection": "close"}), Answer(status, body))

    def _abort_after(self, seconds: float | None) -> None:
        """Aborts the connection after this time without a complete request or read answer; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.transport.abort)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = cast(HttpConnection, writer.transport.get_protocol())
    try:
        while await connection.answer_next(reader, writer):
            pass
    except (OSError, asyncio.IncompleteReadError):
        pass  # closed or aborted
    finally:
        writer.close()


def _is_private(transport: asyncio.Transport) -> bool:
    """Whether no third party can read the traffic."""
    if transport.get_extra_info("sslcontext") is not None:
        return True
    peer = transport.get_extra_info("peername")
    address = ipaddress.ip_address(peer[0].partition("%")[0]) if peer else None
    return address is None or (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _parse_head(head: bytes) -> tuple[HttpRequest, int]:
    """The request and the length of its body; ValueError for what is not HTTP."""
    first, *lines = head.decode("latin-1").split("\r\n")
    if len(lines) > MAX_LINES:
        raise ValueError(f"more than {MAX_LINES} headers")
    if not len(lines) == head.count(b"\r") == head.count(b"\n") or b"\0" in head:
        raise ValueError("a NUL, or a lone CR or LF: a proxy in front may read other headers")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP/1")
    parts = urllib.parse.urlsplit(target)
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name != name.strip() or (name in _ONCE and name in headers):
            raise ValueError("not a header, or a duplicate")
        headers[name] = value.strip()
    length = headers.get("content-length", "0")
    if not length.isdigit() or "transfer-encoding" in headers:
        raise ValueError("unknown length")
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=50))
    return HttpRequest(method, urllib.parse.unquote(parts.path), query, headers), int(length)
