"""TCP in front of the gRPC server, so that a closed connection is known the moment it closes.

gRPC tells a server nothing of a client that is gone between two calls. The relay accepts the connections,
passes bytes to the real server on loopback, and says which local port belonged to the one that closed. A browser
that comes to the same port is passed on to the page, as with torchft's own lighthouse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

CHUNK = 1 << 16
FIRST_WORD_S = 10.0  # a connection that says nothing for so long is closed
PREFACE = b"PRI "  # how HTTP/2, and so gRPC, begins


class Relay:
    """`closed(port, clean)` is called once per gRPC connection; `port` is what the server saw as the peer's."""

    def __init__(
        self,
        grpc: tuple[str, int],
        page: tuple[str, int] | None,
        closed: Callable[[int, bool], None],
        max_silent: int = 1000,
    ) -> None:
        self._grpc = grpc
        self._max_silent = (
            max_silent  # connections that have said nothing yet; the oldest is closed beyond it
        )
        self._page = page
        self._closed = closed
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}  # have said nothing yet; oldest first
        self.addresses: dict[int, str] = {}  # port -> where the client really comes from

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens; returns the bound address."""
        self._server = await asyncio.start_server(self._accept, host, port)
        found: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return found

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Goes on with a connection that somebody else accepted."""
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._accept)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(first)

    async def close(self) -> None:
        """Stops listening and ends every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first = await self._first_word(task, reader)
            if first.startswith(PREFACE[: len(first)]):
                await self._relay(first, reader, writer)
            elif self._page is not None:
                await _join(first, reader, writer, *await asyncio.open_connection(*self._page))
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # gone, or silent for too long, or we close
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _first_word(self, task: asyncio.Task[None], reader: asyncio.StreamReader) -> bytes:
        """What the client says first. Of those who say nothing the oldest goes when there are too many."""
        self._silent[task] = None
        if len(self._silent) > self._max_silent:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        try:
            return await asyncio.wait_for(reader.read(CHUNK), FIRST_WORD_S)
        finally:
            self._silent.pop(task, None)

    async def _relay(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(*self._grpc)
        port: int = inner_writer.get_extra_info("sockname")[1]
        peer = writer.get_extra_info("peername")
        self.addresses[port] = f"{peer[0]}:{peer[1]}" if peer else "?"
        clean = True
        try:
            clean = await _join(first, reader, writer, inner_reader, inner_writer)
        finally:
            self.addresses.pop(port, None)
            self._closed(port, clean)


async def _join(
    first: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    inner_reader: asyncio.StreamReader,
    inner_writer: asyncio.StreamWriter,
) -> bool:
    """Passes bytes both ways until one side ends; whether it ended without an error."""
    inner_writer.write(first)
    up = asyncio.ensure_future(_pump(reader, inner_writer))
    down = asyncio.ensure_future(_pump(inner_reader, writer))
    try:
        done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        return all(task.exception() is None for task in done)
    finally:
        up.cancel()
        down.cancel()
        for end in (writer, inner_writer):
            with contextlib.suppress(OSError, RuntimeError):
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
