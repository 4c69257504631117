"""One small answer over HTTP from a server that may be anything: bounded in bytes and in time as a whole.

Not urllib: it follows redirects, waits per read (a server that drips holds it for ever), takes any length, asks proxies, and
raises errors that are no OSError for whatever is not HTTP.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from allranks.channel.frames import JsonObject, split_address

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d{1,9})\r\n")


@dataclass(frozen=True)
class WebAnswer:
    """A whole answer."""

    status: int
    date: str
    body: bytes

    def object(self) -> JsonObject:
        """The body as a JSON object; ValueError when it is none."""
        try:
            found = json.loads(self.body)
        except RecursionError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("the answer is not a JSON object")
        return found

    def time_s(self) -> float | None:
        """When the server says that it answered, in epoch seconds; None when it does not say."""
        try:
            return parsedate_to_datetime(self.date).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None


def get(address: str, path: str, timeout_s: float, limit: int = 16 << 20, token: str = "") -> WebAnswer:
    """GET of a path at HOST:PORT; OSError when no whole answer came in time or it is not HTTP."""
    if not (address.isprintable() and token.isprintable()) or " " in address:
        raise ValueError(f"{address!r} is not HOST:PORT")
    deadline = time.monotonic() + timeout_s
    head = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {token}\r\n\r\n" if token else "\r\n"
    data = bytearray()
    with socket.create_connection(split_address(address), timeout_s) as sock:
        sock.sendall(head.encode())
        while not _is_whole(data):
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            piece = sock.recv(1 << 16)
            if not piece:
                break
            data += piece
            if len(data) > limit:
                raise OSError(f"the answer is longer than {limit >> 20} MB")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer within {timeout_s:g} s")
    return _read(bytes(data))


def _is_whole(data: bytearray) -> bool:
    """Whether the length that the head names has come; without one it ends when the server closes."""
    end = data.find(b"\r\n\r\n")
    length = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
    return length is not None and len(data) >= end + 4 + int(length[1])


class _Received:
    """Bytes in place of the socket that http.client reads from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read(data: bytes) -> WebAnswer:
    answer = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        answer.begin()
        return WebAnswer(answer.status, answer.headers.get("Date", ""), answer.read())
    except (http.client.HTTPException, ValueError) as error:
        said = data[:40].decode("ascii", "replace").splitlines()[:1] or ["nothing"]
        raise OSError(f"the answer is not HTTP: {said[0]!r} ({type(error).__name__})") from error
