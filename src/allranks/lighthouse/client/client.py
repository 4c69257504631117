"""The lighthouse client of a rank or an agent. Synchronous, with one thread; no torch, asyncio or gRPC.

    client = Client(ClientOptions(addresses=("127.0.0.1:29510",), replica="replica-0")).start()
    quorum = client.join(Member("replica-0", step=12), timeout_s=60)

docs/understand/replicas.md states the guarantees. All socket work happens on the thread "allranks-lighthouse"; any
other thread may call the public methods.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from allranks import errors
from allranks.channel.frames import JsonObject
from allranks.lighthouse import messages
from allranks.lighthouse.client.actions import Actions, Body, PendingAnswer
from allranks.lighthouse.client.link import FATAL, Link
from allranks.lighthouse.client.options import ClientOptions
from allranks.lighthouse.client.proxy_link import ProxyLink
from allranks.lighthouse.client.reactor import Reactor
from allranks.model import cluster

__all__ = ["Client", "ClientOptions"]

log = logging.getLogger("allranks.lighthouse")

_SEEN = 4096  # ids of notices remembered, so that a notice received twice is reported once


class Client(Actions):
    """See the module. `start()` connects and starts the thread, `close()` ends both."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.session = options.session or uuid.uuid4().hex
        self._node = options.node
        self.quorum: cluster.Quorum | None = None  # the last one with this replica as a member
        self.connected = False
        self.lighthouse = ""  # address of the connected lighthouse
        self._reactor = Reactor()
        self._line: Link | ProxyLink | None = None
        self._thread: threading.Thread | None = None
        self._first: PendingAnswer[messages.Welcome] = PendingAnswer(self._not_connected)
        self._lock = threading.Lock()
        self._asking: tuple[PendingAnswer[cluster.Quorum], messages.Join] | None = None
        self._withdrawn: PendingAnswer[messages.NoQuorumYet] | None = None
        self._commands: dict[int, PendingAnswer[messages.Result]] = {}
        self._ids = itertools.count(1)
        self._listeners: list[Callable[[cluster.Notice], None]] = []
        self._seen: dict[int, None] = {}
        self._report = messages.Report()
        self._last_error = ""
        self._refused: errors.LighthouseRefused | None = None
        self._left = False
        self._closed = False

    # ---- start and close --------------------------------------------------------------------------------

    def start(self, timeout_s: float = 60.0) -> Client:
        """Connects. On LighthouseUnreachable or LighthouseRefused everything is closed again."""
        options = self.options.resolved(self.session)
        self._node = options.node
        self._reactor.open()
        self._line = (ProxyLink if options.beacon else Link)(options, self._reactor, self._receive)
        self._line.report(self._report)
        self._thread = threading.Thread(target=self._run, name="allranks-lighthouse", daemon=True)
        _alive.add(self)
        self._thread.start()
        try:
            self._first.result(timeout_s)
        except BaseException:
            self._left = True
            self.close()
            raise
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Leaves, unless done before, and ends the thread. May be called twice."""
        if self._closed:
            return
        self.leave("closed")
        self._closed = True
        self._reactor.call(self._shut)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- quorums ----------------------------------------------------------------------------------------

    def join(self, member: cluster.Member, timeout_s: float = 60.0) -> cluster.Quorum:
        """Requests a quorum and waits for it. Raises QuorumTimeout (which names the missing replicas), ReplicaEvicted, or
        LighthouseUnreachable (not connected to a lighthouse)."""
        return self.request_quorum(member).result(timeout_s)

    def request_quorum(
        self,
        member: cluster.Member,
        unreached: tuple[str, ...] = (),
        unserved: tuple[str, ...] = (),
        patience_s: float = 0.0,
    ) -> PendingAnswer[cluster.Quorum]:
        """Requests a quorum without waiting. A second request before the answer is an error.

        `unreached`, `unserved`: sessions that this rank could not connect to, or could not fetch a state from.
        `patience_s`: how long the caller will wait; the lighthouse waits for stragglers a little less.
        """
        ticket: PendingAnswer[cluster.Quorum] = PendingAnswer(self._no_quorum)
        with self._lock:
            self._check_open()
            if self._asking is not None and not self._asking[0].done():
                raise errors.LighthouseError("this replica has requested a quorum already")
            own = replace(member, session=self.session, node=member.node or self._node)
            self._asking = (ticket, messages.Join(own, 0, unreached, unserved, patience_s))
        self._reactor.call(self._send_join)
        return ticket

    def may_commit(self) -> bool:
        """Whether no other process can have our replica's name now. Cheap: called before every commit.

        The lighthouse reserves the name for `lease_s` after it last heard from us (lighthouse/options.py).
        """
        line = self._line
        return self._refused is None and (line is None or time.monotonic() < line.lease_until)

    def check_name(self) -> None:
        """Raises LighthouseRefused when another process has our replica's name."""
        if self._refused is not None:
            raise self._refused

    def report(self, step: int = -1, progress: int = -1, health: str = "") -> None:
        """Sets the content of the next heartbeats. Cheap: call it every step."""
        self._report = messages.Report(step, progress, health)
        self._reactor.call(self._send_report)

    def leave(self, reason: str = "", finished: bool = False, term: int = 0, step: int = -1) -> None:
        """Shuts down cleanly, so that the others continue at once. Returns when the message is sent.

        `finished`: the training is complete, so a replica that joins later must not start it again alone.
        `term` and `step` are those of the state that this replica held.
        """
        if self._left or self._closed:
            return
        self._left = True
        sent = threading.Event()

        def send() -> None:
            if self._line is not None:
                self._line.finish(messages.encode(messages.Leave(reason, finished, term, step)))
            sent.set()

        self._reactor.call(send)
        if threading.current_thread() is not self._thread:
            sent.wait(2.0)

    # ---- notices ----------------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[cluster.Notice], None]) -> Callable[[], None]:
        """Calls back for every notice on the client's thread; the callback must not block. Returns "unsubscribe"."""
        with self._lock:
            self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    # ---- sockets of a quorum ----------------------------------------------------------------------------

    def hold(self, fds: Iterable[int], number: int) -> None:
        """Shuts down duplicates of these connected sockets as soon as a member of quorum `number` is gone.

        Returns when they are handed over: with a liveness proxy not even a held GIL delays the shutdown from then on.
        """
        copies = [os.dup(fd) for fd in fds]
        handed = threading.Event()

        def hand_over() -> None:
            if self._line is not None:
                self._line.hold(number, copies)
            handed.set()

        self._reactor.call(hand_over)
        if threading.current_thread() is not self._thread:
            handed.wait(2.0)

    def release(self, number: int) -> None:
        """Closes the duplicates of a quorum's sockets; call it when its groups are taken down."""
        if (line := self._line) is not None:
            self._reactor.call(lambda: line.release(number))

    # ---- actions (actions.py) ---------------------------------------------------------------------------

    def _command(
        self,
        action: str,
        replica: str = "",
        reason: str = "",
        replicas: tuple[str, ...] = (),
        body: Body | None = None,
        timeout_s: float = 10.0,
    ) -> JsonObject:
        # a path that is not UTF-8 has lone surrogates, which the lighthouse refuses
        text = json.dumps(asdict(body), ensure_ascii=False).encode(errors="replace").decode() if body else ""
        command = messages.Command(next(self._ids), action, replica, reason, replicas, text)
        ticket: PendingAnswer[messages.Result] = PendingAnswer(
            lambda _, waited: errors.LighthouseUnreachable(
                f"no answer to {action!r} from {self.lighthouse or 'any lighthouse'} in {waited:.1f} s"
            )
        )
        with self._lock:
            self._check_open()
            self._commands[command.id] = ticket
        self._reactor.call(lambda: self._send_command(command, ticket))
        try:
            result = ticket.result(timeout_s)
        finally:
            self._commands.pop(command.id, None)
        if not result.ok:
            raise errors.LighthouseError(result.body)
        answer: JsonObject = json.loads(result.body or "{}")
        return answer

    # ---- on the client's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._line is not None
        try:
            self._line.open()
            self._reactor.run()
        except Exception as error:
            log.exception("the lighthouse client died")
            self._fail_all(errors.LighthouseError(f"the lighthouse client died: {error}"))
        finally:
            self._reactor.close()

    def _shut(self) -> None:
        if self._line is not None:
            self._line.close()
        self._fail_all(errors.LighthouseError("the lighthouse client was closed"))
        self.connected = False
        _alive.discard(self)
        self._reactor.stop()

    def _send_report(self) -> None:
        if self._line is not None:
            self._line.report(self._report)

    def _send_join(self) -> None:
        with self._lock:
            asking = self._asking
        if asking is not None and not asking[0].done():
            known = self.quorum.round if self.quorum else 0
            self._send(replace(asking[1], known=known))  # when the line is down: again with the next Welcome

    def _send(self, message: object) -> bool:
        return self._line is not None and self._line.send(messages.encode(message))

    def _send_command(self, command: messages.Command, ticket: PendingAnswer[messages.Result]) -> None:
        if not self._send(command):
            ticket.fail(errors.LighthouseUnreachable(f"no lighthouse can be reached: {self._last_error}"))

    def _receive(self, kind: int, payload: bytes) -> None:
        message, notice_id = messages.decode(kind, payload, 1 << 30)
        if kind & 0x7F >= messages.FIRST_NOTICE:
            self._notice(message, notice_id)  # type: ignore[arg-type]
        elif isinstance(message, cluster.Quorum):
            self._formed(message)
        elif isinstance(message, messages.Welcome):
            self._welcomed(message)
        elif isinstance(message, messages.Refused):
            self._refuse(message)
        elif isinstance(message, messages.NoQuorumYet):
            if self._withdrawn is not None:
                self._withdrawn.resolve(message)
        elif isinstance(message, messages.Result) and (ticket := self._commands.get(message.id)):
            ticket.resolve(message)

    def _welcomed(self, welcome: messages.Welcome) -> None:
        before, self.lighthouse = self.lighthouse, welcome.lighthouse
        self.connected = True
        self._first.resolve(welcome)
        if welcome.recall and self.quorum is not None:
            self._send(self.quorum)
        self._send_join()
        if before and before != welcome.lighthouse:
            self._publish(cluster.LeaderMoved(welcome.lighthouse, f"before: {before}"))

    def _formed(self, quorum: cluster.Quorum) -> None:
        if quorum.rank_of(self.options.replica) is None:
            return
        if self.quorum is not None and quorum.number < self.quorum.number:
            log.warning("ignored quorum %d: number %d is known", quorum.number, self.quorum.number)
            return
        self.quorum = quorum
        if self._line is not None:
            self._line.known = (quorum.epoch, quorum.number, quorum.round)
            self._send_report()
        if (ticket := self._take_ticket()) is not None:
            ticket.resolve(quorum)

    def _take_ticket(self) -> PendingAnswer[cluster.Quorum] | None:
        with self._lock:
            asking, self._asking = self._asking, None
        return asking[0] if asking is not None else None

    def _refuse(self, refused: messages.Refused) -> None:
        kind = errors.ReplicaEvicted if refused.code == "evicted" else errors.LighthouseRefused
        error = kind(
            f"the lighthouse refused: {refused.message}", refused.code, hint=_HINTS.get(refused.code, "")
        )
        if refused.code in FATAL:
            self._refused = error
            self.connected = False
            self._first.fail(error)
            self._fail_all(error)
            if refused.code in ("superseded", "taken"):
                self._publish(cluster.Superseded(refused.message))
        elif (ticket := self._take_ticket()) is not None:
            ticket.fail(error)

    def _notice(self, notice: cluster.Notice, notice_id: int) -> None:
        if isinstance(notice, cluster.ConnectionLost):
            was, self.connected = self.connected, False
            self._last_error = notice.reason
            if not was:
                return
        elif notice_id:
            self._send(messages.Ack(notice_id))
            if notice_id in self._seen:
                return
            self._seen[notice_id] = None
            if len(self._seen) > _SEEN:
                del self._seen[next(iter(self._seen))]
        self._publish(notice)

    def _publish(self, notice: cluster.Notice) -> None:
        for listener in list(self._listeners):
            try:
                listener(notice)
            except Exception:
                log.exception("a subscriber of the lighthouse client failed")

    # ---- giving up --------------------------------------------------------------------------------------

    def _no_quorum(self, ticket: PendingAnswer[cluster.Quorum], waited_s: float) -> errors.LighthouseError:
        """Withdraws the request and asks the lighthouse why there was no quorum."""
        waiting: PendingAnswer[messages.NoQuorumYet] = PendingAnswer(
            lambda _, __: errors.LighthouseError("no response from the lighthouse")
        )
        with self._lock:
            if self._asking is not None and self._asking[0] is ticket:
                self._asking = None
        if not self.connected or self._closed:
            return errors.LighthouseUnreachable(
                f"quorum not reached after {waited_s:.1f} s: no lighthouse can be reached ({self._last_error})"
            )
        self._withdrawn = waiting
        self._reactor.call(lambda: self._send(messages.Withdraw()))
        if threading.current_thread() is not self._thread and waiting.wait(1.0):
            answer = waiting.result(0.0)
            text = f"quorum not reached after {waited_s:.1f} s: {answer.reason}"
            return errors.QuorumTimeout(text, waited_s, answer.reason, answer.missing)
        text = f"quorum not reached after {waited_s:.1f} s, and no response from the lighthouse"
        return errors.QuorumTimeout(text, waited_s)

    def _not_connected(
        self, ticket: PendingAnswer[messages.Welcome], waited_s: float
    ) -> errors.LighthouseError:
        addresses = self._line.options.addresses if self._line is not None else ()
        return errors.LighthouseUnreachable(
            f"no lighthouse after {waited_s:.1f} s: {self._last_error or ', '.join(addresses)}",
            addresses,
            hint="Is `allranks lighthouse` running there, and may this host connect to it? With TLS it needs --ca or ALLRANKS_CA.",
        )

    def _fail_all(self, error: errors.LighthouseError) -> None:
        if (asked := self._take_ticket()) is not None:
            asked.fail(error)
        for ticket in list(self._commands.values()):
            ticket.fail(error)

    def _check_open(self) -> None:
        self.check_name()
        if self._closed or self._left:
            raise errors.LighthouseError("this client has left the lighthouse")
        if self._thread is None:
            raise errors.LighthouseError("this client was not started")

    def _close_in_child(self) -> None:
        """Closes a forked child's copies of our sockets, which would hide the rank's death from the lighthouse."""
        self._closed = self._left = True
        for each in self._line.fds if self._line is not None else ():
            if each >= 0:
                # not closed: the Python objects still own these descriptors
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(null, each, inheritable=False)
                os.close(null)


_alive: weakref.WeakSet[Client] = weakref.WeakSet()

_HINTS = {
    "token": "Give every process of the job the same ALLRANKS_TOKEN or ALLRANKS_TOKEN_FILE as the lighthouse; or start the "
    "lighthouse with --no-token, where no other user can reach it.",
    "superseded": "Two processes use the same replica name, or a restart replaced this one.",
    "taken": "Each node must start different replicas: `allranks run --first-replica N` numbers this node's replicas from N. "
    "Without `allranks run`, give each process its own replica_id.",
    "finished": "To begin a new training here: allranks lighthouse readmit ADDRESS REPLICA",
    "evicted": "To readmit it: allranks lighthouse readmit ADDRESS REPLICA",
}


def _after_fork_in_child() -> None:
    for client in list(_alive):
        client._close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
