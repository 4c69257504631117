"""HTTP/1.1 on the lighthouse's own port, as little as its page, API and metrics need. On the loop's thread.

Requests are bounded (head 16 KiB and 100 lines, body 64 KiB, 10 s to arrive); answers are whole or server-sent events.
All connections take turns, one request every TURN_S when many come at once, so that members never wait for more than one;
and who sends several gets the next answer only after reading the last ones: a connection never holds more than one answer and UNREAD_BYTES, and all together ALL_UNREAD_BYTES: who has
been reading slowly for longest is cut off. When all places are taken, the host that has most of them loses its oldest.
Everything from outside stays text: routing and JSON are in `web.py`.
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
#: Two of them are an attempt to deceive.
_ONCE = frozenset({"content-length", "host", "authorization", "origin"})
UNREAD_BYTES = 64 << 10  # beyond this no further request is read and no event sent
ALL_UNREAD_BYTES = 16 << 20  # the status of a thousand replicas has half a megabyte


@dataclass(frozen=True)
class HttpRequest:
    """One request, decoded."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # lower-case names
    body: bytes = b""
    private: bool = True  # nobody can listen on the way: TLS, or from this machine


@dataclass(frozen=True)
class Answer:
    """A whole answer; `stream` instead of a body keeps the connection open for events."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    stream: Callable[[EventStream], Callable[[], None]] | None = None  # returns what ends it
    headers: tuple[tuple[str, str], ...] = ()
    framed: bool = False  # our own page may show it in a frame


class EventStream:
    """Where server-sent events are written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unread_since: float | None = None

    def send(self, data: bytes) -> None:
        """One event, unless the last ones are unread (each tells everything); who never reads is cut off."""
        transport = self._transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() <= UNREAD_BYTES:
            self._unread_since = None
            for part in (
                b"data: ",
                memoryview(data),
                b"\n\n",
            ):  # large, and the same for all: not copied for each
                transport.write(part)
            return
        now = asyncio.get_running_loop().time()
        if self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > IDLE_S:
            transport.abort()


@dataclass
class HttpSlots:
    """The connections that are open, and their turns. One that comes when all places are taken has one all the same."""

    limit: int
    open: ConnectionSlots[HttpConnection] = field(init=False)
    _waiting: dict[HttpConnection, None] = field(default_factory=dict)  # for their turn
    _last_turn: float = 0.0
    _timed: bool = False  # the next turn is planned
    unread: dict[HttpConnection, int] = field(default_factory=dict)  # bytes of those who read slowly

    def __post_init__(self) -> None:
        self.open = ConnectionSlots(self.limit)

    def take(self, connection: HttpConnection, host: str) -> None:
        """Comes in; somebody of the host with most connections may have to go."""
        if (surplus := self.open.add(connection, host)) is not None:
            surplus.abort()

    def take_turn(self, connection: HttpConnection) -> bool:
        """Whether it is served at once; if not, its `take_turn` is called later, one every TURN_S."""
        now = asyncio.get_running_loop().time()
        if not self._waiting and now - self._last_turn >= TURN_S:
            self._last_turn = now
            return True
        self._waiting[connection] = None
        self._plan_turn()
        return False

    def _plan_turn(self) -> None:
        if self._waiting and not self._timed:
            self._timed = True
            asyncio.get_running_loop().call_later(TURN_S, self._next_turn)

    def _next_turn(self) -> None:
        self._timed = False
        if self._waiting:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            self._last_turn = asyncio.get_running_loop().time()
            connection.take_turn()
        self._plan_turn()

    def reads_slowly(self, connection: HttpConnection, size: int) -> None:
        """So many bytes wait for it."""
        self.unread[connection] = size
        while len(self.unread) > 1 and sum(self.unread.values()) > ALL_UNREAD_BYTES:
            next(iter(self.unread)).abort()

    def free(self, connection: HttpConnection) -> None:
        """Is gone, or will be in a moment."""
        self.unread.pop(connection, None)
        self._waiting.pop(connection, None)
        self.open.remove(connection)


class HttpConnection(asyncio.Protocol):
    """One connection; requests are handled one after the other."""

    _transport: asyncio.Transport  # from connection_made on, which comes first

    def __init__(self, handle: Callable[[HttpRequest], Answer], places: HttpSlots) -> None:
        self._handle = handle
        self._places = places
        self._rest = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False  # for the turn of the next request
        self._unread = False  # the other side does not take its answers
        self._reading = True
        self._end_stream: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES)
        peer = transport.get_extra_info("peername")
        self._places.take(self, str(peer[0]) if peer else "")
        self._wait(ARRIVAL_S)

    def abort(self) -> None:
        """Ends it at once: its place is needed."""
        self._places.free(self)
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._places.free(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._end_stream is not None:
            self._end_stream()
            self._end_stream = None

    def data_received(self, data: bytes) -> None:
        if self._end_stream is not None:
            return  # nothing more is expected from a listener
        self._rest += data
        self._plan()
        if len(self._rest) > MAX_HEAD + MAX_BODY:  # more than any browser pipelines
            self._refuse(413)
            self._rest.clear()

    def pause_writing(self) -> None:
        self._unread = True
        self._places.reads_slowly(self, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._unread = False
        self._places.unread.pop(self, None)
        self._plan()

    def _plan(self) -> None:
        """The next request, if its answer has room, when it is our turn; nothing more is read before that."""
        while not (self._waiting or self._unread) and self._rest and self._end_stream is None:
            self._waiting = not self._places.take_turn(self)
            if not self._waiting and not self._handle_one():
                break
        self._read(not self._unread and not self._waiting)

    def take_turn(self) -> None:
        """It is our turn to be answered."""
        self._waiting = False
        if self._unread or self._handle_one():
            self._plan()
        else:
            self._read(True)

    def _handle_one(self) -> bool:
        return not self._transport.is_closing() and self._take_one()

    def _read(self, wanted: bool) -> None:
        if self._transport.is_closing() or wanted is self._reading:
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _take_one(self) -> bool:
        """Handles one whole request; False when more bytes are needed or the connection is closed."""
        end = self._rest.find(b"\r\n\r\n", 0, MAX_HEAD + 4)
        if end < 0:
            return self._refuse(431) if len(self._rest) > MAX_HEAD else False
        try:
            request, length = _parse_head(bytes(self._rest[:end]))
        except ValueError:
            return self._refuse(400)
        if length > MAX_BODY:
            return self._refuse(413)
        start, stop = end + 4, end + 4 + length
        if len(self._rest) < stop:
            return False
        whole = replace(
            request,
            body=bytes(self._rest[start:stop]),
            private=request.method != "POST" or _is_private(self._transport),
        )
        del self._rest[:stop]
        try:
            answer = self._handle(whole)
        except Exception:
            log.exception("%r %r failed", whole.method, whole.path)
            answer = Answer(500, b'{"error": "internal error, see the log of the lighthouse"}')
        self._answer(whole, answer)
        return True

    def _answer(self, request: HttpRequest, answer: Answer) -> None:
        if request.method == "HEAD":
            answer = replace(answer, stream=None)
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
        self._transport.writelines([head] if request.method == "HEAD" else [head, answer.body])
        if answer.stream is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._end_stream = answer.stream(EventStream(self._transport))
        elif keep:
            self._wait(IDLE_S)
        else:
            self._transport.close()

    def _refuse(self, status: int) -> bool:
        body = f'{{"error": "{HTTPStatus(status).phrase}"}}'.encode()
        self._answer(HttpRequest("GET", "", headers={"connection": "close"}), Answer(status, body))
        return False

    def _wait(self, seconds: float) -> None:
        """Closes the connection unless a request arrives in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)


def _is_private(transport: asyncio.Transport) -> bool:
    """Whether nobody between the two sides can read what is sent."""
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
        raise ValueError("half an end of line: a proxy before us may read other headers than we do")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP/1")
    parts = urllib.parse.urlsplit(target)
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name != name.strip() or (name in _ONCE and name in headers):
            raise ValueError("not a header, or one that was there already")
        headers[name] = value.strip()
    length = headers.get("content-length", "0")
    if not length.isdigit() or "transfer-encoding" in headers:
        raise ValueError("unknown length")
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=50))
    return HttpRequest(method, urllib.parse.unquote(parts.path), query, headers), int(length)
