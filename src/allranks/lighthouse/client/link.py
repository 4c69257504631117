"""The connection to the lighthouse: hello, heartbeats, and reconnecting, to another address if need be.

Runs on a Reactor's thread, in the client or in the liveness proxy. Passes messages to `receive(kind, payload)` undecoded:
Welcome after each connect, ConnectionLost (made here) after each loss, Refused, and all others. When a member departs,
the sockets held for its quorum are shut down before the message is passed on.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from allranks.channel import frames
from allranks.channel.frames import find_unreachable
from allranks.channel.keys import Keyring, is_proof, prove
from allranks.lighthouse import messages
from allranks.lighthouse.client.options import ClientOptions
from allranks.lighthouse.client.reactor import MAX_FRAME, FrameSocket, Reactor, ReactorTimer
from allranks.model.cluster import ConnectionLost, Probe

log = logging.getLogger("allranks.lighthouse")

FATAL = frozenset({"token", "version", "superseded", "taken", "garbage"})
_MAX_GREETING = 1 << 20  # before the server has proved that it knows our token
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0
CONNECT_TIMEOUT_S = 3.0
PROBE_S = 1.5  # within which a replica must accept a connection


@dataclass
class HeldSockets:
    """Duplicates of the connected sockets of process groups, by quorum number, shut down when a member departs.

    `shutdown` works on the connection, not on the descriptor: through a duplicate in another process it ends a
    collective in which the rank is blocked (measured: in 0.5 ms), without the rank's help.
    """

    by_number: dict[int, list[int]] = field(default_factory=dict)
    # this quorum has lost a member: its groups, and those of earlier quorums, cannot work
    aborted_up_to: int = 0

    def add(self, number: int, fds: Iterable[int]) -> None:
        """Takes ownership. Sockets of a quorum that has lost a member already are shut down at once."""
        self.by_number.setdefault(number, []).extend(fds)
        if number <= self.aborted_up_to:
            self.shut(number)

    def shut(self, number: int) -> None:
        """Shuts down the connections of one quorum; the descriptors stay open until released."""
        self.aborted_up_to = max(self.aborted_up_to, number)
        for fd in self.by_number.get(number, []):
            sock = socket.socket(fileno=fd)
            frames.cut(sock)
            sock.detach()

    def release(self, number: int) -> None:
        """Closes our duplicates of one quorum; the rank's connections stay open."""
        for fd in self.by_number.pop(number, []):
            os.close(fd)

    def drop_all(self, shut: bool) -> None:
        """Closes all duplicates; `shut`: shuts the connections down first, so that peers of a dead rank notice."""
        for number in sorted(self.by_number):
            if shut:
                self.shut(number)
            self.release(number)


class Link:
    """See the module. `open()` starts connecting; `close()` ends the connection for good."""

    def __init__(
        self,
        options: ClientOptions,
        reactor: Reactor,
        receive: Callable[[int, bytes], None],
        beat: Callable[[], messages.Beat] | None = None,
        proxy: bool = False,
    ) -> None:
        self.options = options
        self.known = (0, 0, 0)  # epoch, number, round of the last quorum; sent in the hello
        self.address = ""
        self.up = False
        self.held = HeldSockets()
        #: CLOCK_MONOTONIC: until then no other process can have our replica's name
        self.lease_until = math.inf
        self.on_lease: Callable[[], None] = lambda: None
        self._refusing: set[str] = set()  # addresses where no lighthouse listens
        self._reactor = reactor
        self._receive = receive
        self._beat = beat or self._reported  # makes the next heartbeat
        self._proxy = proxy  # this process is a rank's liveness proxy
        self._report = messages.Report()
        self._line: FrameSocket | None = None  # once connected
        self._attempt = 0  # to connect; results of earlier attempts are discarded
        self._failures = 0
        self._next = 0
        self._redirect = ""  # try this address next: the leader that a standby named, or the last one
        self._closed = False
        self._timeout: ReactorTimer | None = None
        self._beating: ReactorTimer | None = None
        self._welcome: messages.Welcome | None = None
        self._pinged = 0.0
        self._sent_beat: messages.Beat | None = None
        self._last_error = ""
        self._credential = Keyring(options.token).for_purpose(messages.PURPOSE)
        self._transcript: tuple[
            bytes, ...
        ] = ()  # the lighthouse's nonce and our hello: both sides prove over it
        self._proved = False  # the lighthouse knows the job token

    def close(self) -> None:
        """Sends as much of the queue as the socket takes, and closes."""
        self._closed = True
        if self._line is not None:
            self._line.flush()
        self._shut()
        self.held.drop_all(shut=False)

    def reopen(self) -> None:
        """Connects again after `close`."""
        self._closed = False
        self.open()

    def send(self, frame: bytes) -> bool:
        """Queues a frame; False when not connected."""
        if self.up and self._line is not None:
            self._line.send(frame)
        return self.up

    def finish(self, frame: bytes) -> None:
        """Sends the last frame; the connection is not made again when it ends."""
        self.send(frame)
        self._closed = True

    def report(self, report: messages.Report) -> None:
        """Reports with the next heartbeat; at once if the health, which the page shows, has changed."""
        before, self._report = self._report, report
        if before.health != report.health and self._beating is not None:
            self._beating.cancel()
            self._send_beat()

    def hold(self, number: int, fds: Sequence[int]) -> None:
        """Takes descriptors over until they are released."""
        self.held.add(number, fds)

    def release(self, number: int) -> None:
        self.held.release(number)

    @property
    def fds(self) -> list[int]:
        """All descriptors; to be closed in a forked child."""
        sock = self._line and self._line.sock
        return [
            *([sock.fileno()] if sock else []),
            *(fd for fds in self.held.by_number.values() for fd in fds),
        ]

    # ---- connecting -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts to connect, in a thread: a hanging name server must not block the reactor."""
        if self._closed:
            return
        addresses = self.options.addresses
        self.address = self._redirect or addresses[self._next % len(addresses)]
        if not self._redirect:
            self._next += 1
        self._redirect = ""
        self._timeout = self._reactor.later(
            CONNECT_TIMEOUT_S, lambda: self._broken(f"no answer in {CONNECT_TIMEOUT_S} s")
        )
        self._attempt += 1
        connect = partial(self._connect, self._attempt, self.address)
        threading.Thread(target=connect, name="allranks-connect", daemon=True).start()

    def _connect(self, attempt: int, address: str) -> None:
        found: socket.socket | Exception
        try:
            found = dial(address, self.options)
        except (OSError, ValueError) as error:
            found = error
        if not self._is_late(attempt, found):
            self._reactor.call(partial(self._connected, attempt, found))

    def _is_late(self, attempt: int, found: socket.socket | Exception) -> bool:
        """Whether the attempt was given up; closes its socket then."""
        late = attempt != self._attempt
        if late and isinstance(found, socket.socket):
            found.close()
        return late

    def _connected(self, attempt: int, sock: socket.socket | Exception) -> None:
        if self._is_late(attempt, sock):
            return
        if isinstance(sock, Exception):
            if isinstance(sock, ConnectionRefusedError):
                self._note_refusing()
            self._lost(sock)
            return
        options = self.options
        self._line = FrameSocket(sock, self._reactor, self._handle, self._lost)
        self._line.limit = _MAX_GREETING
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
            proxy=self._proxy,
            probes=True,
        )
        frame = messages.encode(hello)
        self._transcript, self._proved = (frame[frames.HEAD.size :],), False
        self._line.send(messages.PREAMBLE + frame)

    # ---- receiving --------------------------------------------------------------------------------------

    def _handle(self, kind: int, payload: bytes) -> None:
        if self.up and kind not in (messages.WELCOME, messages.REFUSED):
            if kind & 0x7F in messages.DEPARTURES:  # first: survivors are blocked
                self.held.shut(getattr(messages.decode(kind, payload)[0], "number", 0))
            self._renew_lease()
            if kind & 0x7F == messages.PROBE:
                self._probe(*messages.decode(kind, payload))
            elif kind != messages.PONG:
                self._receive(kind, payload)
            return
        message, _ = messages.decode(kind, payload, MAX_FRAME if self._proved else _MAX_GREETING)
        if isinstance(message, messages.Challenge):
            self._prove(message)
        elif isinstance(message, messages.Proof):
            self._proved = is_proof(message.proof, self._credential, b"server", *self._transcript)
            if self._proved and self._line is not None:
                self._line.limit = MAX_FRAME
        elif isinstance(message, messages.Refused):
            self._refused(message, payload)
        elif self.options.token and not self._proved:
            why = f"the lighthouse at {self.address} does not know our job token"
            refused = messages.Refused("token", f"{why}: another job's, or started with --no-token?")
            self._refused(refused, messages.encode(refused)[frames.HEAD.size :])
        else:
            if isinstance(message, messages.Welcome):
                self._welcomed(message)
            self._receive(kind, payload)

    def _prove(self, challenge: messages.Challenge) -> None:
        """Proves that we know the job token, without sending it."""
        if len(self._transcript) != 1:
            raise frames.BadFrame("a second Challenge")
        self._transcript = (challenge.nonce.encode(), *self._transcript)
        proof = prove(self._credential, b"client", *self._transcript).hex() if self.options.token else ""
        self._put(messages.encode(messages.Proof(proof)))

    def _put(self, frame: bytes) -> None:
        if self._line is not None:
            self._line.send(frame)

    # ---- connected --------------------------------------------------------------------------------------

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self.up, self._failures, self._welcome = True, 0, welcome
        self._last_error, self._pinged, self._sent_beat = "", 0.0, None
        self._renew_lease()
        if self._timeout is not None:
            self._timeout.cancel()
        self._send_beat()

    def _renew_lease(self) -> None:
        """The lighthouse was heard, or none is running: no other process gets our name for a while."""
        lease_s = self._welcome.lease_s if self._welcome is not None else 0.0
        until = time.monotonic() + lease_s
        if lease_s > 0 and (
            math.isinf(self.lease_until) or until - self.lease_until >= min(0.5, lease_s / 4)
        ):
            self.lease_until = until
            self.on_lease()
        self._refusing.clear()

    def _note_refusing(self) -> None:
        """If no lighthouse listens at any address, none can give our name away: renews the lease."""
        self._refusing.add(self.address)
        if self._refusing.issuperset(self.options.addresses):
            self._renew_lease()

    def _probe(self, probe: object, notice_id: int) -> None:
        """Tries to connect to other replicas, in a thread."""
        self._put(messages.encode(messages.Ack(notice_id)))
        assert isinstance(probe, Probe)
        wanted = {session: tuple(addresses) for session, addresses in probe.addresses.items()}

        def ask() -> None:
            lost = find_unreachable([address for each in wanted.values() for address in each], PROBE_S)
            failed = tuple(session for session, addresses in wanted.items() if lost.intersection(addresses))
            reached = tuple(session for session in wanted if session not in failed)
            frame = messages.encode(messages.Probed(reached, failed))
            self._reactor.call(lambda: self.send(frame))

        threading.Thread(target=ask, name="allranks-probe", daemon=True).start()

    def _refused(self, refused: messages.Refused, payload: bytes) -> None:
        if refused.code in FATAL:
            self._closed = True
            self._shut()
            self._receive(messages.REFUSED, payload)
        elif self.up and refused.code not in ("moved", "draining"):
            self._receive(messages.REFUSED, payload)
        else:
            self._redirect = refused.leader if refused.leader != self.address else ""
            self._broken(refused.message)

    def _send_beat(self) -> None:
        """Sends what has changed, or an empty heartbeat; pings a silent lighthouse, and later gives it up."""
        if not self.up or self._welcome is None or self._line is None:
            return
        now, limit, heard = self._reactor.clock.now, self._welcome.timeout_s, self._line.heard
        if heard < self._pinged < now - limit:
            self._broken(f"the lighthouse is silent for {now - heard:.1f} s", silent=True)
            return
        ping = now - heard >= limit / 2
        if ping and heard >= self._pinged:
            self._pinged = now
        beat = self._beat()
        if not self.up:  # `_beat` found the rank stopped, and closed this connection
            return
        if ping:
            self._put(messages.encode(replace(beat, ping=True)))
        else:
            self._put(messages.EMPTY_BEAT if beat == self._sent_beat else messages.encode(beat))
            self._sent_beat = beat
        self._beating = self._reactor.later(self._welcome.beat_s, self._send_beat)

    def _reported(self) -> messages.Beat:
        return messages.Beat(self._report.step, self._report.progress, 0.0, self._report.health)

    def _lost(self, error: Exception | None) -> None:
        if error is None:
            self._broken("the lighthouse closed the connection")
        elif isinstance(error, frames.BadFrame):
            self._broken(f"not a lighthouse of this version: {error}")
        elif why := getattr(error, "verify_message", ""):  # ssl's
            self._broken(
                f"its TLS certificate is not trusted by {self.options.ca or 'the system certificates'}: {why}"
            )
        else:
            self._broken(getattr(error, "strerror", "") or str(error))

    def _broken(self, reason: str, silent: bool = False) -> None:
        """The connection ended: reports that once, then tries the next address, first at once, later with pauses.

        The same address comes first if it closed the connection (a short interruption), and last if it was silent: a
        frozen lighthouse still accepts connections, and we would wait for its answer.
        """
        was_up = self.up
        if self._line is not None:
            self._line.abandon()
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
                self._redirect = self._redirect or self.address
        rounds = self._failures // max(1, len(self.options.addresses))
        pause = min(_FIRST_PAUSE_S * 2.0**rounds, _LAST_PAUSE_S) * random.uniform(0.5, 1.5)
        self._reactor.later(0.0 if was_up or (self._redirect and not self._failures) else pause, self.open)
        self._failures += 1

    def _shut(self) -> None:
        for timer in (self._timeout, self._beating):
            if timer is not None:
                timer.cancel()
        self.up = False
        self._attempt += 1
        line, self._line = self._line, None
        if line is not None:
            line.close()


def dial(address: str, options: ClientOptions) -> socket.socket:
    """Connects to HOST:PORT, with TLS if configured. Blocks."""
    context = None
    if options.ca or options.certificate:
        import ssl

        context = ssl.create_default_context(cafile=options.ca or None)
        if options.certificate:
            context.load_cert_chain(options.certificate, options.key or None)
    host, port = frames.split_address(address)
    sock = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    frames.tune(sock, 5.0)
    return context.wrap_socket(sock, server_hostname=host) if context is not None else sock
