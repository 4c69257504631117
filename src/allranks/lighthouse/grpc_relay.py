"""TCP in front of the gRPC server, so that a closed connection is known the moment it closes.

gRPC tells a server nothing of a client that is gone between two calls. The relay takes connections that begin like
HTTP/2, passes their bytes to the real server on loopback, and reports which local port belonged to one that closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from allranks.lighthouse.limits import open_files_limit

CHUNK = 1 << 16
CALL_BYTES = 64 << 10  # that a connection may send from one call to the next: four times the largest call
IDLE_BYTES_S = 100.0  # and so much more each second, for the signs of life of a call that waits for hours
PREFACE = b"PRI "  # how HTTP/2, and so gRPC, begins


class Relay:
    """`closed(port)` is called once per connection; `port` is what the server saw as the peer's.

    A connection costs two descriptors. Of more than `max_idle` that are no member's the oldest is closed; when all of
    them take half of the descriptors of this process, nobody else comes in.
    """

    def __init__(self, grpc: tuple[str, int], closed: Callable[[int], None], max_idle: int) -> None:
        self._grpc = grpc
        self._closed = closed
        self._max_idle = max_idle
        self._max = open_files_limit() // 4
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}  # no member's; oldest first
        self._ports: dict[int, tuple[asyncio.Task[None], str]] = {}
        self._left: dict[int, float] = {}  # bytes that a connection may send until its next call

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Goes on with a connection that was accepted elsewhere and has sent `first`."""
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(first)

    def address(self, port: int) -> str:
        """Where the client of a call from this port really is."""
        return self._ports[port][1] if port in self._ports else "?"

    def heard(self, port: int) -> None:
        """A whole call has come from this port."""
        if port in self._left:
            self._left[port] = CALL_BYTES

    def keep(self, port: int) -> None:
        """The connection of this port is a member's."""
        if port in self._ports:
            self._idle.pop(self._ports[port][0], None)

    async def close(self) -> None:
        """Ends every connection."""
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
        self._idle[task] = None
        if len(self._idle) > self._max_idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.cancel()
        try:
            await self._relay(task, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # gone, or too many are idle, or we close
        finally:
            self._tasks.discard(task)
            self._idle.pop(task, None)
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
            await asyncio.gather(*pumps, return_exceptions=True)
            with contextlib.suppress(OSError, RuntimeError):
                inner_writer.close()
            del self._ports[port]
            self._left.pop(port, None)
            self._closed(port)

    async def _take_in(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the client sends CALL_BYTES and no call: gRPC would keep headers without end."""
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
