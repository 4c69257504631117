"""TCP in front of the gRPC server, so that a closed connection is known the moment it closes.

gRPC tells a server nothing of a client that is gone between two calls. The relay accepts the connections,
passes bytes to the real server on loopback, and says which local port belonged to the one that closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

CHUNK = 1 << 16


class Relay:
    """`closed(port, clean)` is called once per connection; `port` is what the gRPC server saw as the peer's."""

    def __init__(self, target: tuple[str, int], closed: Callable[[int, bool], None]) -> None:
        self._target = target
        self._closed = closed
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.addresses: dict[int, str] = {}  # port -> where the client really comes from

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens; returns the bound address."""
        self._server = await asyncio.start_server(self._accept, host, port)
        found: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return found

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
            await self._relay(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        port: int = inner_writer.get_extra_info("sockname")[1]
        peer = writer.get_extra_info("peername")
        self.addresses[port] = f"{peer[0]}:{peer[1]}" if peer else "?"
        clean = True
        up = asyncio.ensure_future(_pump(reader, inner_writer))
        down = asyncio.ensure_future(_pump(inner_reader, writer))
        try:
            done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            clean = all(task.exception() is None for task in done)
        finally:
            up.cancel()
            down.cancel()
            for end in (writer, inner_writer):
                with contextlib.suppress(OSError, RuntimeError):
                    end.close()
            self.addresses.pop(port, None)
            self._closed(port, clean)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
