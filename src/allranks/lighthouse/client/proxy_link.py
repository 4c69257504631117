"""The client's end of a liveness proxy: starts the process, speaks frames over a socketpair, starts it again if it dies.

Has the same face as Link, so the client does not care which one it has. Runs on the client's Reactor.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import allranks
from allranks.channel.frames import HEAD, READ_BYTES, BadFrame, take_frames
from allranks.lighthouse.client.link import LinkOptions
from allranks.lighthouse.client.reactor import Reactor
from allranks.lighthouse.messages import WELCOME, Hold, Release, Report, Start, encode
from allranks.model.cluster import ConnectionLost

log = logging.getLogger("allranks.lighthouse")

_MAX_FRAME = 256 << 20
_MAX_FDS = 250
_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0  # before one that dies at once is started again
_STEADY_S = 10.0  # one that lived so long is started again at once


class ProxyLink:
    """See the module."""

    def __init__(
        self,
        options: LinkOptions,
        reactor: Reactor,
        receive: Callable[[int, bytes], None],
        black_box: str = "",
    ) -> None:
        self.options = options
        self.known = (0, 0, 0)
        self.address = ""
        self.up = False
        self.process: subprocess.Popen[bytes] | None = None
        self._reactor = reactor
        self._receive = receive
        self._box = black_box
        self._line: socket.socket | None = None
        self._in = bytearray()
        self._out: deque[tuple[bytes, tuple[int, ...]]] = deque()  # frame, descriptors to send along
        self._report = Report()
        self._starts = 0  # in quick succession
        self._started = 0.0
        self._closed = False

    def open(self) -> None:
        """Starts the process and tells it where to go."""
        self._starts, self._started = self._starts + 1, time.monotonic()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._line = ours
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-s",
                    "-m",
                    "allranks.lighthouse.client.liveness_proxy",
                    "--fd",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._reactor.watch(ours.fileno(), self._ready)
        start = Start(json.dumps(asdict(self.options)), os.getpid(), self._box)
        self._out.append((encode(start), ()))
        self.report(self._report)

    def close(self) -> None:
        """Closes the line; the liveness proxy ends by itself and is reaped."""
        self._closed = True
        self._flush()
        self._shut()

    def send(self, frame: bytes) -> bool:
        """Queues a frame; False when the lighthouse cannot be reached."""
        if not self.up:
            return False
        self._out.append((frame, ()))
        self._flush()
        return True

    def finish(self, frame: bytes) -> None:
        """Sends the last frame; the liveness proxy does not come back after it."""
        self.send(frame)

    def report(self, report: Report) -> None:
        """What the liveness proxy's next heartbeats should say."""
        self._report = Report(report.step, report.progress, report.health, self.known)
        self._out.append((encode(self._report), ()))
        self._flush()

    def hold(self, number: int, fds: Sequence[int]) -> None:
        """Hands descriptors over; ours are closed once they are sent."""
        for i in range(0, len(fds), _MAX_FDS):
            some = tuple(fds[i : i + _MAX_FDS])
            self._out.append((encode(Hold(number, len(some))), some))
        self._flush()

    def release(self, number: int) -> None:
        """Lets the liveness proxy close what it holds for this quorum."""
        self._out.append((encode(Release(number)), ()))
        self._flush()

    @property
    def fd(self) -> int:
        """The line's descriptor, or -1."""
        return self._line.fileno() if self._line is not None else -1

    # ---- inside -----------------------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        self._flush()
        while self._line is not None:
            try:
                data = self._line.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self._died()
                return
            self._in += data
            if len(data) < READ_BYTES:
                break
        try:
            for kind, payload in take_frames(self._in, _MAX_FRAME):
                if kind == WELCOME:
                    self.up = True
                elif kind == _CONNECTION_LOST:
                    self.up = False
                self._receive(kind, payload)
        except BadFrame:
            self._died()

    def _flush(self) -> None:
        if self._line is None:
            return
        try:
            while self._out:
                frame, fds = self._out[0]
                sent = socket.send_fds(self._line, [frame], fds) if fds else self._line.send(frame)
                self._out.popleft()
                for fd in fds:
                    os.close(fd)
                if sent < len(frame):
                    self._out.appendleft((frame[sent:], ()))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._reactor.later(0.0, self._died)
            return
        self._reactor.watch(self._line.fileno(), self._ready, write=bool(self._out))

    def _died(self) -> None:
        """Somebody killed the liveness proxy: start another, with pauses if that goes on."""
        if self._line is None or self._closed:
            return
        self._shut()
        lost = encode(ConnectionLost("the liveness proxy died"))
        self._receive(lost[HEAD.size - 1], lost[HEAD.size :])
        if time.monotonic() - self._started >= _STEADY_S:
            self._starts = 0
        pause = min(_PAUSE_S * self._starts, _LAST_PAUSE_S) if self._starts > 1 else 0.0
        self._reactor.later(pause, self._open_again)

    def _open_again(self) -> None:
        if self._closed:
            return
        try:
            self.open()
        except OSError as error:  # no process or descriptor is free just now
            log.warning("the liveness proxy cannot be started: %s", error)
            self._reactor.later(_LAST_PAUSE_S, self._open_again)

    def _shut(self) -> None:
        self.up = False
        self._in.clear()
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        if self._line is not None:
            self._reactor.forget(self._line.fileno())
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
    """Where the liveness proxy finds allranks. Nothing else: without `site` and msgspec it starts in a third of the time."""
    return str(Path(allranks.__file__).parents[1])
