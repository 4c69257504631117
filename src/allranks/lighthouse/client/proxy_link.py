"""The client's side of a liveness proxy: starts the process, sends frames over a socketpair, restarts it if it dies.

Has the interface of Link. Runs on the client's Reactor.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import allranks
from allranks.channel.frames import HEAD
from allranks.lighthouse.client.options import ClientOptions
from allranks.lighthouse.client.reactor import MAX_FDS, FrameSocket, Reactor
from allranks.lighthouse.messages import (
    LEASE,
    WELCOME,
    Hold,
    NameLease,
    Release,
    Report,
    Start,
    decode,
    encode,
)
from allranks.model.cluster import ConnectionLost

log = logging.getLogger("allranks.lighthouse")

_PAUSE_S = 0.2  # before a dead proxy is restarted
_FULL_PAUSE_S = 5.0  # the same after the process could not be started


class ProxyLink:
    def __init__(
        self, options: ClientOptions, reactor: Reactor, receive: Callable[[int, bytes], None]
    ) -> None:
        self.options = options
        self.known = (0, 0, 0)
        self.up = False
        self.lease_until = math.inf
        self.process: subprocess.Popen[bytes] | None = None
        self._reactor = reactor
        self._receive = receive
        self._line: FrameSocket | None = None
        self._report = Report()
        self._closed = False

    def open(self) -> None:
        """Starts the process and sends it the options."""
        ours, theirs = socket.socketpair()
        module, fd = "allranks.lighthouse.client.liveness_proxy", str(theirs.fileno())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-m", module, "--fd", fd],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._line = FrameSocket(ours, self._reactor, self._take, self._died)
        self._put(Start(json.dumps(asdict(self.options)), os.getpid(), self.options.black_box))
        self.report(self._report)

    def close(self) -> None:
        """Closes the socketpair; the liveness proxy exits by itself and is reaped."""
        self._closed = True
        if self._line is not None:
            self._line.flush()
        self._shut()

    def send(self, frame: bytes) -> bool:
        """Queues a frame; False when not connected to a lighthouse."""
        if self.up and self._line is not None:
            self._line.send(frame)
        return self.up

    def finish(self, frame: bytes) -> None:
        """Sends the last frame; the liveness proxy does not reconnect after it."""
        self.send(frame)

    def report(self, report: Report) -> None:
        """Sets the content of the liveness proxy's next heartbeats."""
        self._report = Report(report.step, report.progress, report.health, self.known)
        self._put(self._report)

    def hold(self, number: int, fds: Sequence[int]) -> None:
        """Sends descriptors to the liveness proxy; ours are closed once sent, or at once while none runs."""
        for i in range(0, len(fds), MAX_FDS):
            some = tuple(fds[i : i + MAX_FDS])
            self._put(Hold(number, len(some)), some)

    def release(self, number: int) -> None:
        """Lets the liveness proxy close the descriptors of this quorum."""
        self._put(Release(number))

    def _put(self, message: object, fds: tuple[int, ...] = ()) -> None:
        if self._line is not None:
            self._line.send(encode(message), fds)
            return
        for fd in fds:
            os.close(fd)

    @property
    def fds(self) -> list[int]:
        """All descriptors; to be closed in a forked child."""
        sock = self._line.sock if self._line is not None else None
        return [sock.fileno()] if sock is not None else []

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == LEASE:
            lease, _ = decode(kind, payload)
            self.lease_until = lease.until if isinstance(lease, NameLease) else self.lease_until
            return
        if kind == WELCOME:
            self.up = True
        elif kind == _CONNECTION_LOST:
            self.up = False
        self._receive(kind, payload)

    def _died(self, error: Exception | None) -> None:
        """The liveness proxy was killed: starts another one."""
        if self._closed:
            return
        self._shut()
        lost = encode(ConnectionLost("the liveness proxy died"))
        self._receive(_CONNECTION_LOST, lost[HEAD.size :])
        self._reactor.later(_PAUSE_S, self._open_again)

    def _open_again(self) -> None:
        if self._closed:
            return
        try:
            self.open()
        except OSError as error:  # out of processes or descriptors
            log.warning("the liveness proxy cannot be started: %s", error)
            self._reactor.later(_FULL_PAUSE_S, self._open_again)

    def _shut(self) -> None:
        self.up = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if self.process is not None:
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)
            self.process = None


_CONNECTION_LOST = encode(ConnectionLost(""))[HEAD.size - 1]


def _python_path() -> str:
    """The folder of allranks, and no other: without `site` and msgspec the process starts in a third of the time."""
    return str(Path(allranks.__file__).parents[1])
