"""The line to the lighthouse: connects, says hello, beats, and finds another address when it breaks.

Runs on a Reactor's thread, in the client or in the liveness proxy. What arrives is handed to `receive(kind, payload)`
undecoded (the liveness proxy only passes it on): Welcome each time the line is up, ConnectionLost (made here) each
time it breaks, Refused, and all the rest.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from allranks.channel import frames
from allranks.channel.keys import Keyring, is_proof, prove
from allranks.lighthouse import messages
from allranks.lighthouse.client.reactor import Reactor, ReactorTimer
from allranks.model.cluster import ConnectionLost

log = logging.getLogger("allranks.lighthouse")

FATAL = frozenset({"token", "version", "superseded", "garbage"})
ResolvedAddress = tuple[socket.AddressFamily, Any]
_AGAIN = (BlockingIOError, InterruptedError)
_MAX_FRAME = 256 << 20
_MAX_GREETING = 1 << 20  # of a server that has not proved yet that it knows our token
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0


@dataclass(frozen=True)
class LinkOptions:
    """Where to go and who we are."""

    addresses: tuple[str, ...]
    token: str = ""
    role: str = "replica"
    replica: str = ""
    session: str = ""
    node: str = ""
    rank: int = 0
    connections: int = 1
    heartbeat_s: float = 0.0  # 0: as the lighthouse says
    connect_timeout_s: float = 3.0
    ca: str = ""  # PEM file; switches TLS on
    certificate: str = ""  # mTLS
    key: str = ""
    server_name: str = ""  # expected in the certificate; "": the host of the address
    proxy: bool = False  # we are a rank's liveness proxy


class Link:
    """See the module. `open()` starts connecting; `close()` ends the line for good."""

    def __init__(
        self,
        options: LinkOptions,
        reactor: Reactor,
        receive: Callable[[int, bytes], None],
        beat: Callable[[], messages.Beat],
    ) -> None:
        self.options = options
        self.known = (0, 0, 0)  # epoch, number, round of the last quorum; told in the hello
        self.address = ""
        self.up = False
        self._reactor = reactor
        self._receive = receive
        self._beat = beat
        self._socket: socket.socket | None = None
        self._connecting = False
        self._attempt = 0  # to connect; what an earlier one brings is too late
        self._in = bytearray()
        self._out = bytearray()
        self._failures = 0
        self._next = 0
        self._detour = ""  # the leader that a standby named
        self._closed = False
        self._timeout: ReactorTimer | None = None
        self._beating: ReactorTimer | None = None
        self._welcome: messages.Welcome | None = None
        self._heard = self._pinged = 0.0
        self._sent_beat: messages.Beat | None = None
        self._last_error = ""
        self._credential = Keyring(options.token).for_purpose(messages.PURPOSE)
        self._said: tuple[bytes, ...] = ()  # the lighthouse's nonce and our hello: what both sides prove
        self._proved = False  # the lighthouse has
        self._secure = False
        self._again: tuple[type[OSError], ...] = _AGAIN  # not ready, try later

    def close(self) -> None:
        """Sends what is waiting as far as the socket takes it, and ends."""
        self._closed = True
        self._flush()
        self._shut()

    def send(self, frame: bytes) -> bool:
        """Queues a frame; False when there is no lighthouse to send it to."""
        if not self.up:
            return False
        self._out += frame
        self._flush()
        return True

    def finish(self, frame: bytes) -> None:
        """Sends the last frame; the connection may end now and is not made again."""
        self.send(frame)
        self._closed = True

    @property
    def fd(self) -> int:
        """The socket's descriptor, or -1; to be closed in a forked child."""
        return self._socket.fileno() if self._socket is not None else -1

    # ---- connecting -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begins to connect."""
        if self._closed:
            return
        options = self.options
        self.address = self._detour or options.addresses[self._next % len(options.addresses)]
        if not self._detour:
            self._next += 1
        self._detour = ""
        self._timeout = self._reactor.later(
            options.connect_timeout_s, lambda: self._broken(f"no answer in {options.connect_timeout_s} s")
        )
        self._attempt += 1
        resolve(self.address, self._reactor, partial(self._resolved, self._attempt))

    def _resolved(self, attempt: int, found: ResolvedAddress | Exception) -> None:
        """The address is looked up, unless it took so long that we gave up."""
        if attempt != self._attempt:
            return
        options = self.options
        if isinstance(found, Exception):
            self._broken(f"{found}")
            return
        family, target = found
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            frames.tune(self._socket, max(options.connect_timeout_s, 5.0))
            code = self._socket.connect_ex(target)
        except OSError as error:
            self._broken(f"{error}")
            return
        if code not in (0, errno.EINPROGRESS):
            self._broken(os.strerror(code))
            return
        self._connecting = True
        self._reactor.watch(self._socket.fileno(), self._ready, write=True)

    def _connected(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._broken(os.strerror(code))
            return
        self._connecting = False
        options = self.options
        if options.ca or options.certificate:
            self._start_tls()
        epoch, number, round_ = self.known
        hello = messages.Hello(
            nonce=os.urandom(16).hex(),
            role=options.role,
            replica=options.replica,
            session=options.session,
            node=options.node,
            rank=options.rank,
            connections=options.connections,
            epoch=epoch,
            number=number,
            round=round_,
            pid=os.getpid(),
            proxy=options.proxy,
        )
        frame = messages.encode(hello)
        self._said, self._proved = (frame[frames.HEAD.size :],), False
        self._out = bytearray(messages.PREAMBLE + frame)
        self._flush()

    def _start_tls(self) -> None:
        """Wraps the socket; the handshake goes on by itself with the first reads and writes."""
        import ssl

        assert self._socket is not None
        options = self.options
        self._secure, self._again = True, (*_AGAIN, ssl.SSLWantReadError, ssl.SSLWantWriteError)
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.certificate:
            context.load_cert_chain(options.certificate, options.key or None)
        name = options.server_name or frames.split_address(self.address)[0]
        self._reactor.forget(self._socket.fileno())
        self._socket = context.wrap_socket(self._socket, server_hostname=name, do_handshake_on_connect=False)
        self._reactor.watch(self._socket.fileno(), self._ready, write=True)

    # ---- reading and writing ----------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        if self._connecting:
            self._connected()
            return
        self._flush()
        self._read()

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(frames.READ_BYTES)
            except self._again:
                break
            except OSError as error:
                self._broken(_words(error))
                return
            if not data:
                self._broken("the lighthouse closed the connection")
                return
            self._heard, self._pinged = self._reactor.clock.now, 0.0
            self._in += data
            if len(data) < frames.READ_BYTES and not self._secure:
                break
        self._parse()

    def _parse(self) -> None:
        try:
            for kind, payload in frames.take_frames(self._in, _MAX_FRAME):
                self._handle(kind, payload)
            if not self._proved:
                frames.check_length(len(self._in), _MAX_GREETING)
        except frames.BadFrame as error:
            self._broken(f"this is no lighthouse of our version: {error}")

    def _handle(self, kind: int, payload: bytes) -> None:
        if self.up and kind not in (messages.WELCOME, messages.REFUSED):
            self._receive(kind, payload)
            return
        message, _ = messages.decode(kind, payload, _MAX_FRAME if self._proved else _MAX_GREETING)
        if isinstance(message, messages.Challenge):
            self._prove(message)
        elif isinstance(message, messages.Proof):
            self._proved = is_proof(message.proof, self._credential, b"server", *self._said)
        elif isinstance(message, messages.Refused):
            self._refused(message, payload)
        elif self.options.token and not self._proved:
            why = f"the lighthouse at {self.address} does not know our job token"
            refused = messages.Refused(
                "token", f"{why}: is it another job's, or was it started with --no-token?"
            )
            self._refused(refused, messages.encode(refused)[frames.HEAD.size :])
        else:
            if isinstance(message, messages.Welcome):
                self._welcomed(message)
            self._receive(kind, payload)

    def _prove(self, challenge: messages.Challenge) -> None:
        """Answers with what only a holder of the job token can say; the token itself stays here."""
        if len(self._said) != 1:
            raise frames.BadFrame("a second Challenge")
        self._said = (challenge.nonce.encode(), *self._said)
        proof = prove(self._credential, b"client", *self._said).hex() if self.options.token else ""
        self._out += messages.encode(messages.Proof(proof))
        self._flush()

    def _flush(self) -> None:
        if self._socket is None or self._connecting:
            return
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except self._again as error:
            handshake = type(error).__name__ == "SSLWantReadError"  # the other side is to speak first
            self._reactor.watch(self._socket.fileno(), self._ready, write=not handshake)
            return
        except OSError as error:
            self._broken(_words(error))
            return
        self._reactor.watch(self._socket.fileno(), self._ready)

    # ---- life -------------------------------------------------------------------------------------------

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self.up, self._failures, self._welcome = True, 0, welcome
        self._last_error = ""
        self._heard, self._pinged = self._reactor.clock.now, 0.0
        self._sent_beat = None
        if self._timeout is not None:
            self._timeout.cancel()
        self._send_beat()

    def _refused(self, refused: messages.Refused, payload: bytes) -> None:
        if refused.code in FATAL:
            self._closed = True
            self._shut()
            self._receive(messages.REFUSED, payload)
        elif self.up and refused.code not in ("moved", "draining"):
            self._receive(messages.REFUSED, payload)
        else:
            self._detour = refused.leader if refused.leader != self.address else ""
            self._broken(refused.message)

    def _send_beat(self) -> None:
        """Says what is new, or only that we live; asks for a sign of life when the lighthouse is silent."""
        if not self.up or self._welcome is None:
            return
        now, limit = self._reactor.clock.now, self._welcome.timeout_s
        if self._pinged and now - self._pinged > limit:
            self._broken(f"the lighthouse is silent for {now - self._heard:.1f} s", silent=True)
            return
        ping = now - self._heard >= limit / 2
        if ping and not self._pinged:
            self._pinged = now
        beat = self._beat()
        if not self.up:  # the proxy has seen that its rank is stopped, and ended this
            return
        if ping:
            self._out += messages.encode(
                messages.Beat(beat.step, beat.progress, beat.idle_s, beat.health, ping=True)
            )
        else:
            self._out += messages.EMPTY_BEAT if beat == self._sent_beat else messages.encode(beat)
            self._sent_beat = beat
        self._flush()
        if self.up:
            self._beating = self._reactor.later(
                self.options.heartbeat_s or self._welcome.beat_s, self._send_beat
            )

    def _broken(self, reason: str, silent: bool = False) -> None:
        """The line is cut: tell it once, then try the next address, at first at once, later with pauses.

        The same one comes first when it closed the line (a blip), last when it is silent: a frozen lighthouse
        still takes connections and would cost us the time to wait for its word.
        """
        was_up = self.up
        self._shut()
        if self._closed:
            return
        text = f"{self.address}: {reason}"
        if was_up or text != self._last_error:
            self._last_error = text
            frame = messages.encode(ConnectionLost(text))
            self._receive(frame[frames.HEAD.size - 1], frame[frames.HEAD.size :])
        if was_up:
            self._failures = 0
            if silent:
                self._next += self.options.addresses[self._next % len(self.options.addresses)] == self.address
            else:
                self._detour = self._detour or self.address
        rounds = self._failures // max(1, len(self.options.addresses))
        pause = min(_FIRST_PAUSE_S * 2.0**rounds, _LAST_PAUSE_S) * random.uniform(0.5, 1.5)
        self._reactor.later(0.0 if was_up or (self._detour and not self._failures) else pause, self.open)
        self._failures += 1

    def _shut(self) -> None:
        for timer in (self._timeout, self._beating):
            if timer is not None:
                timer.cancel()
        self.up = False
        self._attempt += 1
        self._in.clear()
        self._out.clear()
        if self._socket is not None:
            self._reactor.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


def resolve(
    address: str, reactor: Reactor, tell: Callable[[ResolvedAddress | Exception], None]
) -> threading.Thread | None:
    """Looks HOST:PORT up and tells on the reactor's thread: at once for numbers, from a thread (returned) for names,
    because a name server that hangs must not hold up heartbeats and notices."""
    try:
        host, port = frames.split_address(address)
    except ValueError as error:
        tell(error)
        return None
    try:
        tell(_look_up(host, port, socket.AI_NUMERICHOST))
        return None
    except socket.gaierror:
        pass

    def ask() -> None:
        found: ResolvedAddress | Exception
        try:
            found = _look_up(host, port)
        except OSError as error:
            found = error
        reactor.call(lambda: tell(found))

    thread = threading.Thread(target=ask, name="allranks-resolve", daemon=True)
    thread.start()
    return thread


def _look_up(host: str, port: int, flags: int = 0) -> ResolvedAddress:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, target


def _words(error: OSError) -> str:
    return error.strerror or str(error)
