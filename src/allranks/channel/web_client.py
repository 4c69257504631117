"""One HTTP request to an untrusted server, bounded in bytes and in total time.

Not urllib, which follows redirects, has only a timeout per read, accepts any length and uses proxies.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from allranks.channel.frames import JsonObject, split_address

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@dataclass(frozen=True)
class WebAnswer:
    status: int
    date: str
    body: bytes

    def object(self) -> JsonObject:
        """The body as a JSON object; ValueError when it is not one."""
        try:
            found = json.loads(self.body)
        except RecursionError:
            found = None
        if not isinstance(found, dict):
            raise ValueError("the answer is not a JSON object")
        return found

    def time_s(self) -> float | None:
        """The server's Date in epoch seconds; None without a valid one."""
        try:
            return parsedate_to_datetime(self.date).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None


def get(address: str, path: str, timeout_s: float, limit: int = 16 << 20, token: str = "") -> WebAnswer:
    """GETs a path from HOST:PORT; OSError when no complete HTTP answer arrives in time."""
    if not (address.isprintable() and token.isprintable()) or " " in address:
        raise ValueError(f"{address!r} is not HOST:PORT")
    connection = http.client.HTTPConnection(*split_address(address), timeout=timeout_s)
    headers = {"Connection": "close", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        answer, body = ask(connection, "GET", path, timeout_s, limit, headers=headers)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"the answer is not HTTP: {error!r}") from error
    finally:
        connection.close()
    return WebAnswer(answer.status, answer.headers.get("Date", ""), body)


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    timeout_s: float,
    limit: int,
    body: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[http.client.HTTPResponse, bytes]:
    """A complete answer and its body. On OSError or HTTPException the caller must close the connection."""
    deadline = time.monotonic() + timeout_s
    connection.response_class = lambda sock, **options: http.client.HTTPResponse(  # type: ignore[assignment]
        _TimedReader(sock, deadline),  # type: ignore[arg-type]  # http.client needs no more than makefile
        **options,
    )
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    connection.request(method, path, body, headers)
    with connection.getresponse() as response:
        data = response.read(limit + 1)
        if len(data) > limit:
            raise OSError(f"the answer is longer than {limit >> 20} MB")
        if response.length:
            raise http.client.IncompleteRead(data, response.length)
    return response, data


class _TimedReader(io.RawIOBase):
    """A raw socket reader for http.client with one deadline for head and body: a slow server can meet any limit per read."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """The one method of a socket that http.client calls."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
