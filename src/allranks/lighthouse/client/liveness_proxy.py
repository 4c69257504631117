"""The liveness proxy: a helper process that holds a rank's connection to the lighthouse, independent of the rank's GIL.

    python -m allranks.lighthouse.client.liveness_proxy --fd N

N is its end of a socketpair; the client (proxy_link.py) has the other and sends Start first. The proxy sends heartbeats
for the rank (alive by pidfd, progress from the black box), relays frames both ways, shuts down the sockets that it holds
when a member of their quorum departs, and reports the rank's death at once. It exits with the rank or its client.
Standard library only, not even msgspec, so that it starts fast.
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

_STOPPED_POLL_S = 0.1  # between checks of the process state of a stopped rank
_POLL_S = 0.5  # the same for a running rank, besides the check with every heartbeat


@dataclass(frozen=True)
class RankProgress:
    """A rank's progress, from its black box. `count` grows with every step and call."""

    step: int
    count: int
    closed: str = ""


def read_mark(path: str) -> RankProgress | None:
    """The rank's progress; None without a readable black box."""
    try:
        head = parse_header(read_regular(path, STRUCT.size))
    except (OSError, InputError):
        return None
    return RankProgress(head.step, max(head.step, 0) + head.calls_started + head.calls_completed, head.closed)


class LivenessProxy:
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
        self._timeout_s = 0.0  # the lighthouse's heartbeat timeout, from its Welcome
        self._seen_running = time.monotonic()
        self._stopped = False  # the rank is stopped, and the lighthouse was notified

    def run(self) -> None:
        """Runs until the rank or its client is gone."""
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
            pass  # an old kernel: the closed socketpair reports the death
        self._link.open()
        self._poll()

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
        self._check()  # here, since a separate wake-up would cost as much as the heartbeat
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

    def _poll(self) -> None:
        self._check()
        self._reactor.later(_STOPPED_POLL_S if self._stopped else _POLL_S, self._poll)

    def _check(self) -> None:
        """Reports a stopped rank, for which this process still sends heartbeats; reconnects when the rank resumes."""
        now = time.monotonic()
        if process_state(self._pid) != "T":  # a debugger's stop ("t") ends by itself
            self._seen_running = now
            if self._stopped and self._link is not None:
                self._stopped = False
                self._link.reopen()
        elif not self._stopped and 0 < self._timeout_s <= now - self._seen_running and self._link is not None:
            self._stopped = True
            self._link.held.drop_all(shut=True)
            why = f"process {self._pid} was stopped by SIGSTOP"
            self._link.send(messages.encode(messages.Died(why, stopped=True)))
            self._link.close()
            # the first message that it reads when it resumes: it must not commit alone, for the others have continued
            lost = MemberLost(self._link.options.replica, f"declared lost: {why}", number=self._link.known[1])
            self._line.send(messages.encode(lost))

    # ---- the end ----------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """The rank is gone: shuts its connections down first, then notifies the lighthouse."""
        if self._link is not None:
            self._link.held.drop_all(shut=True)
        if self._link is not None and not self._left:
            mark = read_mark(self._box) if self._box else None
            died = messages.Died(f"{reason} ({mark.closed})" if mark and mark.closed else reason)
            self._link.send(messages.encode(died))
        self._reactor.stop()


def main() -> None:
    """Entry point of the process. No argparse, which would take a quarter of the start."""
    if len(sys.argv) != 3 or sys.argv[1] != "--fd":
        sys.exit(__doc__)
    # Ctrl-C and a launcher's SIGTERM are for the rank; the liveness proxy exits after the rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[2])) as line:
        LivenessProxy(line).run()


if __name__ == "__main__":
    main()
