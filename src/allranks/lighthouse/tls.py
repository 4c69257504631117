"""TLS of the lighthouse's port. A handshake counts as a stranger from its first packet: asyncio's own TLS server would let
silent connections take every descriptor before anybody has counted them. On the loop's thread."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from typing import cast

from allranks.lighthouse.connection import Connection, Listener
from allranks.lighthouse.options import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """None without a certificate."""
    if not options.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.certificate, options.key or None)
    if options.client_ca:
        context.load_verify_locations(options.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Handshake(asyncio.Protocol):
    """An accepted connection until TLS is agreed; its socket then goes on as a Connection."""

    def __init__(self, door: Listener, context: ssl.SSLContext) -> None:
        self._door, self._context = door, context
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the socket over before anything is read from it."""
        try:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as error:  # no descriptor is free
            self._door.throttle.warn("tls", "no TLS: %s", error)
            return
        finally:
            cast(asyncio.Transport, transport).abort()
        self._door.let_in(self)
        self._task = asyncio.get_running_loop().create_task(self._agree(self._socket))

    def refuse_quietly(self, why: str) -> None:
        """Drops a stranger; the handshake fails by it."""
        self._door.strangers.pop(self, None)
        self._door.throttle.warn(why, "a TLS handshake: %s: closed", why)
        with suppress(OSError):
            cast(socket.socket, self._socket).shutdown(socket.SHUT_RDWR)

    async def _agree(self, sock: socket.socket) -> None:
        limit = self._door.options.hello_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._door), sock, ssl=self._context, ssl_handshake_timeout=limit
            )
        except OSError as error:  # not TLS, no right certificate, or gone
            self._door.throttle.warn("tls", "no TLS: %s", error)
        finally:
            self._door.strangers.pop(self, None)
