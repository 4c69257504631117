"""HTTP/1.1 on the lighthouse's own port, as little as its page, API and metrics need. On the loop's thread.

Requests are bounded (head 16 KiB, body 64 KiB, 10 s to arrive); answers are whole or server-sent events.
Everything from outside stays text: routing and JSON are in `web.py`.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

log = logging.getLogger("allranks.lighthouse")

MAX_HEAD = 16 << 10
MAX_BODY = 64 << 10
ARRIVAL_S = 10.0
IDLE_S = 60.0
_WRITE_LIMIT = 4 << 20  # a browser that does not read is cut off beyond this


@dataclass(frozen=True)
class Request:
    """One request, decoded."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # lower-case names
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """A whole answer; `stream` instead of a body keeps the connection open for events."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    stream: Callable[[EventStream], Callable[[], None]] | None = None  # returns what ends it
    headers: tuple[tuple[str, str], ...] = ()


class EventStream:
    """Where server-sent events are written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def send(self, data: bytes) -> None:
        """One event; a browser that has gone or does not read is dropped."""
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _WRITE_LIMIT:
            self._transport.abort()
            return
        self._transport.write(b"data: " + data + b"\n\n")


class HttpConnection(asyncio.Protocol):
    """One connection; requests are handled one after the other."""

    def __init__(self, handle: Callable[[Request], Answer], full: bool = False) -> None:
        self._handle = handle
        self._full = full  # too many are open already: answer 503 and close
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._timer: asyncio.TimerHandle | None = None
        self._end_stream: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._wait(ARRIVAL_S)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._end_stream is not None:
            self._end_stream()
            self._end_stream = None

    def data_received(self, data: bytes) -> None:
        if self._end_stream is not None:
            return  # nothing more is expected from a listener
        if self._full:
            self._refuse(503)
            return
        self._rest += data
        while self._rest and self._end_stream is None and self._take_one():
            pass

    def _take_one(self) -> bool:
        """Handles one whole request; False when more bytes are needed or the connection is closed."""
        head, separator, rest = self._rest.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            return self._refuse(431)
        if not separator:
            return False
        try:
            request, length = _parse_head(head)
        except ValueError:
            return self._refuse(400)
        if length > MAX_BODY:
            return self._refuse(413)
        if len(rest) < length:
            return False
        self._rest = rest[length:]
        whole = Request(request.method, request.path, request.query, request.headers, rest[:length])
        try:
            answer = self._handle(whole)
        except Exception:
            log.exception("%s %s failed", whole.method, whole.path)
            answer = Answer(500, b'{"error": "internal error, see the log of the lighthouse"}')
        self._answer(whole, answer)
        return True

    def _answer(self, request: Request, answer: Answer) -> None:
        assert self._transport is not None
        keep = request.headers.get("connection", "").lower() != "close" and answer.stream is None
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Date: {formatdate(usegmt=True)}",
        ]
        lines += [
            f"Content-Type: {answer.kind}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
        ]
        lines += ["Content-Security-Policy: default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        if answer.stream is None:
            lines += [
                f"Content-Length: {len(answer.body)}",
                f"Connection: {'keep-alive' if keep else 'close'}",
            ]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        self._transport.write(head if request.method == "HEAD" else head + answer.body)
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
        self._answer(Request("GET", "", headers={"connection": "close"}), Answer(status, body))
        return False

    def _wait(self, seconds: float) -> None:
        """Closes the connection unless a request arrives in time."""
        if self._timer is not None:
            self._timer.cancel()
        transport = self._transport
        if transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)


def _parse_head(head: bytes) -> tuple[Request, int]:
    """The request and the length of its body; ValueError for what is no HTTP."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP/1")
    parts = urllib.parse.urlsplit(target)
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError("not a header")
        headers[name.strip().lower()] = value.strip()
    length = headers.get("content-length", "0")
    if not length.isdigit() or "transfer-encoding" in headers:
        raise ValueError("unknown length")
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=50))
    return Request(method, urllib.parse.unquote(parts.path), query, headers), int(length)
