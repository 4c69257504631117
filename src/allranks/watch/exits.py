"""Wakes the watch the moment a rank ends, or says that it will: pidfds, and an ear for ranks. Runs in the agent.

Liveness comes from outside the rank: a pidfd becomes readable when the process is gone. A rank whose script raised
lives on in its exit handlers, sometimes for seconds: its recorder notes the exception in the black box and knocks.
A knock says nothing but "look": anybody may knock, the box decides.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from allranks.blackbox.layout import knock_address


@dataclass(frozen=True)
class Ending:
    """How a process ended. `code` is that of subprocess (negative: a signal); None when somebody else took it."""

    pid: int
    code: int | None
    at: float  # epoch seconds

    @property
    def words(self) -> str:
        """ "died of SIGKILL", "exited with code 3"."""
        if self.code is None:
            return "exited without shutting down"
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"died of {signal.Signals(-self.code).name}"
        except ValueError:
            return f"died of signal {-self.code}"


@dataclass
class ExitWatcher:
    """`wait` and `hold` belong to one thread; `wake` may be called from any."""

    endings: dict[int, Ending] = field(default_factory=dict)  # pid -> how it ended
    _held: dict[int, int] = field(default_factory=dict)  # pid -> pidfd
    _selector: selectors.BaseSelector | None = None
    _ear: socket.socket | None = None
    _wake: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        """Opens the ear."""
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # a second watch in this process: the first one hears
            self._ear.bind(knock_address(os.getpid()))
        for end in (self._wake[0], self._ear):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ, -1)

    def close(self) -> None:
        """Lets go of everything."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        for end in (self._ear, *(self._wake or ())):
            if end is not None:
                end.close()
        self._ear = self._wake = None

    def wake(self) -> None:
        """Ends the wait that is under way, or the next one."""
        if self._wake is not None:
            with contextlib.suppress(OSError):
                self._wake[1].send(b"!")

    def hold(self, pids: Iterable[int]) -> None:
        """Learns at once when one of these ends. Those held already stay held."""
        if self._selector is None:
            return
        for pid in pids:
            self.endings.pop(pid, None)  # of an earlier process with this pid: this one runs
            if pid not in self._held:
                with contextlib.suppress(OSError):  # gone already: its box tells
                    fd = os.pidfd_open(pid)
                    self._held[pid] = fd
                    self._selector.register(fd, selectors.EVENT_READ, pid)

    def wait(self, timeout_s: float) -> None:
        """Returns when something happened, or after the time."""
        assert self._selector is not None, "start() comes first"
        for key, _ in self._selector.select(timeout_s):
            if key.data == -1:
                with contextlib.suppress(BlockingIOError):
                    while key.fileobj.recv(4096):  # type: ignore[union-attr]
                        pass
            else:
                self._bury(key.data)

    def _bury(self, pid: int) -> None:
        assert self._selector is not None
        fd = self._held.pop(pid)
        self._selector.unregister(fd)
        self.endings[pid] = Ending(pid, _exit_code(fd), time.time())
        os.close(fd)


def _exit_code(pidfd: int) -> int | None:
    """Of a child of this process, left for its parent's own wait(); None when that has been first."""
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
