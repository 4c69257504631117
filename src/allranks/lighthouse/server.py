"""The lighthouse's server: startup, main loop, shutdown. Runs as a process (`allranks lighthouse`), or in a thread:

    with Lighthouse(Options(min_replicas=2)) as lighthouse:
        print(lighthouse.address, lighthouse.status().reason)

With TLS a handshake counts as unauthenticated from its first packet: asyncio's own TLS server would let silent
connections use up all descriptors before they are counted.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from allranks.channel.frames import cut, join_address
from allranks.errors import ConfigurationError, LighthouseError
from allranks.lighthouse import page
from allranks.lighthouse.connection import HTTP, Connection, Listener, serve_at
from allranks.lighthouse.election import Election, EtcdOptions
from allranks.lighthouse.history import History
from allranks.lighthouse.messages import Refused, encode
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.page import take_snapshot
from allranks.lighthouse.service import Service
from allranks.lighthouse.status import PersistedState, Status
from allranks.lighthouse.web import page_taker


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """None without a certificate."""
    if not options.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files = " and ".join(filter(None, (options.certificate, options.key)))
    try:
        context.load_cert_chain(options.certificate, options.key or None)
        if options.client_ca:
            files = options.client_ca
            context.load_verify_locations(options.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        bad = "not a certificate and its key in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigurationError(f"cannot use {files} for TLS: {bad}") from error
    return context


def explain_listen(error: BaseException, address: str) -> tuple[str, str]:
    """Why a lighthouse cannot listen there, and a hint."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        port = address.rpartition(":")[2]
        hint = (
            f"`ss -ltnp 'sport = :{port}'` shows it. --bind {address.rpartition(':')[0]}:0 takes a free port."
        )
        return f"cannot listen on {address}: another process uses this port", hint
    why = os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
    return f"cannot listen on {address}: {why}", "--bind HOST:PORT takes an address of this machine."


class Handshake(asyncio.Protocol):
    """An accepted connection during its TLS handshake; its socket then becomes a Connection."""

    def __init__(self, listener: Listener, context: ssl.SSLContext) -> None:
        self._listener, self._context = listener, context
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the socket over before any byte is read from it."""
        try:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:  # no descriptor is free
            self._listener.throttle.warn("tls", "no TLS: %s", error)
            return
        finally:
            cast(asyncio.Transport, transport).abort()
        self._listener.let_in(self, transport.get_extra_info("peername"))
        self._task = asyncio.get_running_loop().create_task(self._handshake(self._socket))

    def refuse_quietly(self, why: str) -> None:
        """Drops the connection, so that the handshake fails."""
        self._listener.unauthenticated.remove(self)
        self._listener.throttle.warn(why, "a TLS handshake: %s: closed", why)
        if self._socket is not None:
            cut(self._socket)

    async def _handshake(self, sock: socket.socket) -> None:
        limit = self._listener.options.hello_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._listener), sock, ssl=self._context, ssl_handshake_timeout=limit
            )
        except OSError as error:  # not TLS, a wrong certificate, or a closed connection
            self._listener.throttle.warn("tls", "no TLS: %s", error)
        finally:
            self._listener.unauthenticated.remove(self)


log = logging.getLogger("allranks.lighthouse")

#: Another protocol (gRPC): entered once the lighthouse listens, exited before it drains.
OtherProtocol = Callable[[Listener], AbstractAsyncContextManager[None]]
T = TypeVar("T")


class Lighthouse:
    """The server. `serve()` for a process of its own, `start()` / `close()` for a thread."""

    def __init__(
        self,
        options: Options | None = None,
        server: ServerOptions | None = None,
        *,
        allow_hosts: Sequence[str] = (),
        protocols: Sequence[OtherProtocol] = (),
        etcd: EtcdOptions | None = None,
    ) -> None:
        self.options = options or Options()
        self.server = server or ServerOptions()
        self.allow_hosts = tuple(allow_hosts)  # further host names under which the page is served
        self.protocols = tuple(protocols)
        self.etcd = etcd
        self.address = ""  # known once it listens
        self.service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None

    # ---- in a thread ------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 30.0) -> Lighthouse:
        """Serves from a thread; returns once it listens. Raises LighthouseError when it cannot."""
        self._thread = threading.Thread(target=self._run, name="allranks-lighthouse-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise LighthouseError(f"the lighthouse did not listen within {timeout_s} s")
        if self._error is not None:
            self._thread.join(timeout_s)
            text, hint = explain_listen(self._error, f"{self.server.host}:{self.server.port}")
            raise LighthouseError(text, hint=hint)
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Drains and stops. May be called twice."""
        loop, stop, thread = self._loop, self._stop, self._thread
        if loop is not None and stop is not None and not loop.is_closed():
            with suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join(timeout_s)

    def __enter__(self) -> Lighthouse:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[[Service], T], timeout_s: float = 10.0) -> T:
        """Runs `function(service)` on the loop's thread and returns its result."""
        assert self._loop is not None and self.service is not None

        async def run() -> T:
            assert self.service is not None
            return function(self.service)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout_s)

    def status(self) -> Status:
        return self.call(take_snapshot)

    def _run(self) -> None:
        try:
            loop = new_event_loop()
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(self.serve(asyncio.Event()))
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                asyncio.set_event_loop(None)
                loop.close()
        except BaseException as error:
            self._error = error
            if self._ready.is_set():
                log.exception("the lighthouse died")
        finally:
            self._ready.set()

    # ---- on the loop ------------------------------------------------------------------------------------

    async def serve(self, stop: asyncio.Event, listening: Callable[[], None] | None = None) -> None:
        """Serves until `stop` is set; calls `listening()` once it listens."""
        self._loop, self._stop = asyncio.get_running_loop(), stop
        history = History(Path(self.server.history) if self.server.history else None)
        service = Service(
            self.options,
            self._loop,
            job=self.server.job,
            leading=self.etcd is None,
            history=history,
            token_file=self.server.token_path,
        )
        if self.etcd is None:  # no state survives a restart: the clock keeps (epoch, number) unique
            service.state.epoch = int(time.time())
        listener = Listener(service, self.server)
        listener.takers |= dict.fromkeys(HTTP, page_taker(service, self.server.token, self.allow_hosts))
        server = await self._listen(listener)
        try:
            self.service = service
            service.address = self.address
            service.start()
            try:
                history.open()
            except OSError as error:
                log.warning("the history of the page stays in memory: %s", error)
            async with AsyncExitStack() as stack:
                for other in self.protocols:
                    await stack.enter_async_context(other(listener))
                if self.etcd is not None:
                    await stack.enter_async_context(_elected(self.etcd, service))
                self._ready.set()
                if listening is not None:
                    listening()
                await self._main_loop(listener, stop)
        finally:
            server.close()
            await self._drain(listener)
            service.close()
            history.close()

    async def _listen(self, listener: Listener) -> asyncio.Server:
        context = tls_context(self.server)
        server = await serve_at(
            lambda: Handshake(listener, context) if context else Connection(listener),
            self.server.host,
            self.server.port,
        )
        host, port = server.sockets[0].getsockname()[:2]
        self.address = self.server.advertise or join_address(host, port)
        log.info("listening on %s%s", self.address, " with TLS" if context else "")
        return server

    async def _main_loop(self, listener: Listener, stop: asyncio.Event) -> None:
        ticks = itertools.count()
        while not stop.is_set():
            if next(ticks) % 2 == 0:  # every second
                page.tick(listener.service)
            try:
                await asyncio.wait_for(stop.wait(), 0.5)
            except asyncio.TimeoutError:
                listener.drop_slow()

    async def _drain(self, listener: Listener) -> None:
        """Refuses all clients with "draining", and waits until that is sent."""
        service = listener.service
        service.draining = True
        refused = Refused("draining", "this lighthouse is closing", service.leader)
        frame = encode(refused)
        for connection in list(listener.open):
            connection.deliver(refused, frame)
            connection.close()
        for _ in range(int(self.server.drain_s / 0.02)):
            if not listener.open:
                return
            await asyncio.sleep(0.02)
        log.warning("%d connections did not close within %.1f s", len(listener.open), self.server.drain_s)
        for connection in list(listener.open):
            connection.refuse_quietly("did not close in time")


@asynccontextmanager
async def _elected(options: EtcdOptions, service: Service) -> AsyncIterator[None]:
    """Takes part in the election while the lighthouse runs; resigns at the end."""

    def lead(kept: PersistedState) -> None:
        service.lead(kept, election.keep)

    election = Election(options, service.address, lead, service.follow)
    task = asyncio.create_task(election.run())
    try:
        yield
    finally:
        service.draining = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await election.close()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed (a third of the CPU per heartbeat), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
