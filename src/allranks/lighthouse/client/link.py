"""The line to the lighthouse: connects, says hello, beats, and finds another address when it breaks.

Runs on a Reactor's thread, in the client or in the liveness proxy. What arrives is handed to `receive(kind, payload)`
undecoded (the liveness proxy only passes it on): Welcome each time the line is up, ConnectionLost (made here) each
time it breaks, Refused, and all the rest. Sockets that it holds are shut first when a member of their quorum is gone.
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
_MAX_GREETING = 1 << 20  # of a server that has not proved yet that it knows our token
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0
CONNECT_TIMEOUT_S = 3.0
PROBE_S = 1.5  # within which a replica must accept a connection


@dataclass
class HeldSockets:
    """Connected sockets of process groups that we own, by number of the quorum, to be shut when a member of it is gone.

    `shutdown` works on the connection, not on the descriptor: a duplicate held by another process ends a
    collective that the rank is blocked in (measured: in 0.5 ms), without the rank's help.
    """

    by_number: dict[int, list[int]] = field(default_factory=dict)
    aborted_up_to: int = 0  # a member of this quorum is gone: no group of it, or of an earlier one, works

    def add(self, number: int, fds: Iterable[int]) -> None:
        """Takes ownership. What comes too late, for a quorum that lost a member already, is shut at once."""
        self.by_number.setdefault(number, []).extend(fds)
        if number <= self.aborted_up_to:
            self.shut(number)

    def shut(self, number: int) -> None:
        """Ends the connections of one quorum. The descriptors stay held until released."""
        self.aborted_up_to = max(self.aborted_up_to, number)
        for fd in self.by_number.get(number, []):
            sock = socket.socket(fileno=fd)
            frames.cut(sock)
            sock.detach()

    def release(self, number: int) -> None:
        """Closes our duplicates of one quorum; the connections live on in the rank."""
        for fd in self.by_number.pop(number, []):
            os.close(fd)

    def drop_all(self, shut: bool) -> None:
        """Closes everything; `shut` ends the connections too (the rank is dead, its peers must know)."""
        for number in sorted(self.by_number):
            if shut:
                self.shut(number)
            self.release(number)


class Link:
    """See the module. `open()` starts connecting; `close()` ends the line for good."""

    def __init__(
        self,
        options: ClientOptions,
        reactor: Reactor,
        receive: Callable[[int, bytes], None],
        beat: Callable[[], messages.Beat] | None = None,
        proxy: bool = False,
    ) -> None:
        self.options = options
        self.known = (0, 0, 0)  # epoch, number, round of the last quorum; told in the hello
        self.address = ""
        self.up = False
        self.held = HeldSockets()
        #: CLOCK_MONOTONIC: until then no other process can have our replica's name
        self.lease_until = math.inf
        self.on_lease: Callable[[], None] = lambda: None
        self._refusing: set[str] = set()  # addresses where no lighthouse listens
        self._reactor = reactor
        self._receive = receive
        self._beat = beat or self._reported  # what the next heartbeat says
        self._proxy = proxy  # we are a rank's liveness proxy
        self._report = messages.Report()
        self._line: FrameSocket | None = None  # once it is connected
        self._attempt = 0  # to connect; what an earlier one brings is too late
        self._failures = 0
        self._next = 0
        self._detour = ""  # the leader that a standby named
        self._closed = False
        self._timeout: ReactorTimer | None = None
        self._beating: ReactorTimer | None = None
        self._welcome: messages.Welcome | None = None
        self._pinged = 0.0
        self._sent_beat: messages.Beat | None = None
        self._last_error = ""
        self._credential = Keyring(options.token).for_purpose(messages.PURPOSE)
        self._said: tuple[bytes, ...] = ()  # the lighthouse's nonce and our hello: what both sides prove
        self._proved = False  # the lighthouse has

    def close(self) -> None:
        """Sends what is waiting as far as the socket takes it, and ends."""
        self._closed = True
        if self._line is not None:
            self._line.flush()
        self._shut()
        self.held.drop_all(shut=False)

    def reopen(self) -> None:
        """After `close`: connects again."""
        self._closed = False
        self.open()

    def send(self, frame: bytes) -> bool:
        """Queues a frame; False when there is no lighthouse to send it to."""
        if self.up and self._line is not None:
            self._line.send(frame)
        return self.up

    def finish(self, frame: bytes) -> None:
        """Sends the last frame; the connection may end now and is not made again."""
        self.send(frame)
        self._closed = True

    def report(self, report: messages.Report) -> None:
        """Goes out with the next heartbeat; another health at once, which the page shows."""
        before, self._report = self._report, report
        if before.health != report.health and self._beating is not None:
            self._beating.cancel()
            self._send_beat()

    def hold(self, number: int, fds: Sequence[int]) -> None:
        """Takes descriptors over, until they are released."""
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
        """Begins to connect, in a thread: a name server that hangs must not hold up the reactor."""
        if self._closed:
            return
        addresses = self.options.addresses
        self.address = self._detour or addresses[self._next % len(addresses)]
        if not self._detour:
            self._next += 1
        self._detour = ""
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
        """Whether it took so long that we gave up."""
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
        self._said, self._proved = (frame[frames.HEAD.size :],), False
        self._line.send(messages.PREAMBLE + frame)

    # ---- what comes -------------------------------------------------------------------------------------

    def _handle(self, kind: int, payload: bytes) -> None:
        if self.up and kind not in (messages.WELCOME, messages.REFUSED):
            if kind & 0x7F in messages.DEPARTURES:  # before anything else: survivors are blocked
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
            self._proved = is_proof(message.proof, self._credential, b"server", *self._said)
            if self._proved and self._line is not None:
                self._line.limit = MAX_FRAME
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
        self._put(messages.encode(messages.Proof(proof)))

    def _put(self, frame: bytes) -> None:
        if self._line is not None:
            self._line.send(frame)

    # ---- life -------------------------------------------------------------------------------------------

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self.up, self._failures, self._welcome = True, 0, welcome
        self._last_error, self._pinged, self._sent_beat = "", 0.0, None
        self._renew_lease()
        if self._timeout is not None:
            self._timeout.cancel()
        self._send_beat()

    def _renew_lease(self) -> None:
        """The lighthouse was heard, or does not exist: nobody else has our name for a while."""
        lease_s = self._welcome.lease_s if self._welcome is not None else 0.0
        until = time.monotonic() + lease_s
        if lease_s > 0 and (
            math.isinf(self.lease_until) or until - self.lease_until >= min(0.5, lease_s / 4)
        ):
            self.lease_until = until
            self.on_lease()
        self._refusing.clear()

    def _note_refusing(self) -> None:
        """Where no lighthouse listens, nobody is given our name: training continues without one."""
        self._refusing.add(self.address)
        if self._refusing.issuperset(self.options.addresses):
            self._renew_lease()

    def _probe(self, probe: object, notice_id: int) -> None:
        """Tries to reach others, in a thread; the training does not notice."""
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
            self._detour = refused.leader if refused.leader != self.address else ""
            self._broken(refused.message)

    def _send_beat(self) -> None:
        """Says what is new, or only that we live; asks for a sign of life when the lighthouse is silent."""
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
        if not self.up:  # the proxy has seen that its rank is stopped, and ended this
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
            self._broken(f"this is not a lighthouse of our version: {error}")
        elif why := getattr(error, "verify_message", ""):  # ssl's
            self._broken(
                f"its TLS certificate does not pass the check with {self.options.ca or 'those of the system'}: {why}"
            )
        else:
            self._broken(getattr(error, "strerror", "") or str(error))

    def _broken(self, reason: str, silent: bool = False) -> None:
        """The line is cut: tell it once, then try the next address, at first at once, later with pauses.

        The same one comes first when it closed the line (a blip), last when it is silent: a frozen lighthouse
        still takes connections and would cost us the time to wait for its word.
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
        line, self._line = self._line, None
        if line is not None:
            line.close()


def dial(address: str, options: ClientOptions) -> socket.socket:
    """A connection to HOST:PORT, with TLS if the options say so. Blocks."""
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
