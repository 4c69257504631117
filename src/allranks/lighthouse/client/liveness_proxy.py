"""The liveness proxy: a helper process that holds a rank's line to the lighthouse, so that it needs no GIL of the rank.

    python -m allranks.lighthouse.client.liveness_proxy --fd N

N is its end of a socketpair; the other is the client's (proxy_link.py), which sends Start first. It beats
for the rank ("process alive" by pidfd, "progressing" from the black box), passes frames both ways, shuts the
sockets it holds when a member of their quorum is gone, and tells the rank's death at once. It ends with the
rank or with its client. Standard library only, no torch, no numpy, not even msgspec: it starts in no time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from allranks.blackbox.header import STRUCT, parse_header, process_state, read_regular
from allranks.channel.frames import HEAD, BadFrame
from allranks.errors import InputError
from allranks.lighthouse import messages
from allranks.lighthouse.client.link import Link
from allranks.lighthouse.client.options import ClientOptions
from allranks.lighthouse.client.reactor import FrameSocket, Reactor
from allranks.model.cluster import MemberLost

_LOOK_S = 0.1  # how often the rank's process state is looked at while it is stopped; else with every beat
_NO_BEAT_S = 0.5  # the same while beats are rare or the line is down


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is, by its black box. `count` grows with every step and call."""

    step: int
    count: int
    closed: str = ""


def read_mark(path: str) -> RankProgress | None:
    """The rank's mark; None when there is no black box (yet) or it is not one."""
    try:
        head = parse_header(read_regular(path, STRUCT.size))
    except (OSError, InputError):
        return None
    return RankProgress(head.step, max(head.step, 0) + head.calls_started + head.calls_completed, head.closed)


class LivenessProxy:
    """One rank's liveness proxy. `run()` returns when the rank or its client is gone."""

    def __init__(self, line: socket.socket) -> None:
        self._reactor = Reactor()
        self._socket = line
        self._link: Link | None = None
        self._pid = 0
        self._box = ""
        self._report = messages.Report()
        self._left = False
        self._count = -1
        self._moved_at = time.monotonic()
        self._timeout_s = 0.0  # the lighthouse's heartbeat timeout, once it has said it
        self._seen_running = time.monotonic()
        self._asleep = False  # the rank is stopped, and the lighthouse was told

    def run(self) -> None:
        """Until the rank or its client is gone."""
        self._reactor.open()
        self._line = FrameSocket(self._socket, self._reactor, self._from_rank, self._rank_lost)
        try:
            self._reactor.run()
        finally:
            if self._link is not None:
                self._link.held.drop_all(shut=True)
                self._link.close()
            self._reactor.close()

    # ---- the rank's side --------------------------------------------------------------------------------

    def _rank_lost(self, error: Exception | None) -> None:
        if isinstance(error, BadFrame):
            self._end(f"the rank sent garbage to its liveness proxy: {error}")
        else:
            self._end(f"process {self._pid} exited")

    def _from_rank(self, kind: int, payload: bytes) -> None:
        code, link = kind & 0x7F, self._link
        if code == messages.START:
            self._start(messages.decode(kind, payload)[0])
        elif link is None:
            raise BadFrame("a message before Start")
        elif code in (messages.HOLD, messages.RELEASE, messages.REPORT):
            message, _ = messages.decode(kind, payload)
            if isinstance(message, messages.Hold):
                mine, self._line.fds = self._line.fds[: message.count], self._line.fds[message.count :]
                link.hold(message.number, mine)
            elif isinstance(message, messages.Release):
                link.release(message.number)
            elif isinstance(message, messages.Report):
                self._report = message
                if len(message.known) == 3:
                    link.known = (message.known[0], message.known[1], message.known[2])
        else:
            frame = HEAD.pack(len(payload), kind) + payload
            self._left = self._left or code == messages.LEAVE
            (link.finish if self._left else link.send)(frame)

    def _start(self, start: object) -> None:
        assert isinstance(start, messages.Start)
        self._pid, self._box = start.pid, start.black_box
        options = messages.load(ClientOptions, start.link.encode())
        self._link = Link(options, self._reactor, self._from_lighthouse, self._beat, proxy=True)
        self._link.on_lease = self._pass_lease
        try:
            pidfd = os.pidfd_open(self._pid)
            self._reactor.watch(pidfd, lambda events: self._end(f"process {self._pid} died"))
        except ProcessLookupError:
            self._end(f"process {self._pid} died")
            return
        except OSError:
            pass  # an old kernel: the closed line tells it
        self._link.open()
        self._look()

    # ---- the lighthouse's side --------------------------------------------------------------------------

    def _from_lighthouse(self, kind: int, payload: bytes) -> None:
        if kind == messages.WELCOME:
            welcome, _ = messages.decode(kind, payload)
            if isinstance(welcome, messages.Welcome):
                self._timeout_s = welcome.timeout_s
        self._line.send(HEAD.pack(len(payload), kind) + payload)

    def _pass_lease(self) -> None:
        if self._link is not None:
            self._line.send(messages.encode(messages.NameLease(self._link.lease_until)))

    def _beat(self) -> messages.Beat:
        self._check()  # here, since a wake-up of its own costs as much as the beat
        report, mark = self._report, read_mark(self._box) if self._box else None
        step = max(report.step, mark.step) if mark else report.step
        count = report.progress if report.progress >= 0 else (mark.count if mark else -1)
        now = time.monotonic()
        if mark is not None and report.progress >= 0:
            count = report.progress + mark.count
        if count != self._count:
            self._count, self._moved_at = count, now
        idle = round(now - self._moved_at, 1)
        return messages.Beat(step, count, idle if count >= 0 and idle >= 1.0 else 0.0, report.health)

    # ---- a stopped rank ---------------------------------------------------------------------------------

    def _look(self) -> None:
        self._check()
        self._reactor.later(_LOOK_S if self._asleep else _NO_BEAT_S, self._look)

    def _check(self) -> None:
        """We beat although the rank is stopped: so we must tell. Thawed, the line is made anew."""
        now = time.monotonic()
        if process_state(self._pid) != "T":  # a debugger's stop ("t") ends by itself
            self._seen_running = now
            if self._asleep and self._link is not None:
                self._asleep = False
                self._link.reopen()
        elif not self._asleep and 0 < self._timeout_s <= now - self._seen_running and self._link is not None:
            self._asleep = True
            self._link.held.drop_all(shut=True)
            why = f"process {self._pid} was stopped by SIGSTOP"
            self._link.send(messages.encode(messages.Died(why, stopped=True)))
            self._link.close()
            # the first that it reads when it runs again: the others continue without it, so it must not commit alone
            lost = MemberLost(self._link.options.replica, f"declared lost: {why}", number=self._link.known[1])
            self._line.send(messages.encode(lost))

    # ---- the end ----------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """The rank is gone: end its connections first, then tell the lighthouse."""
        if self._link is not None:
            self._link.held.drop_all(shut=True)
        if self._link is not None and not self._left:
            mark = read_mark(self._box) if self._box else None
            died = messages.Died(f"{reason} ({mark.closed})" if mark and mark.closed else reason)
            self._link.send(messages.encode(died))
        self._reactor.stop()


def main() -> None:
    """Entry point of the process. No argparse: it costs a quarter of the start."""
    if len(sys.argv) != 3 or sys.argv[1] != "--fd":
        sys.exit(__doc__)
    # Ctrl-C and a launcher's SIGTERM are for the rank; the liveness proxy ends when the rank has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[2])) as line:
        LivenessProxy(line).run()


if __name__ == "__main__":
    main()
