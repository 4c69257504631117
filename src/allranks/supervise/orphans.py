"""Ends what ranks have started when the agent itself is killed: no orphan, ever.

The kernel ends the ranks of a dead agent, but not the ranks' own children (a DataLoader worker that sleeps, a command).
A small process with nothing of torch holds a pipe to the agent. While the agent lives it only listens; when the pipe
closes, it kills the process groups that it was told of and ends.

python orphans.py      (its orders come on stdin: "+PID" a rank has started, "-PID" nothing of it is left)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def sweep(group: int) -> None:
    """Ends what a rank has left behind: a worker that sleeps outlives its parent and keeps memory and devices."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class Guard:
    """The agent's side. Ranks are leaders of process groups; what leaves its rank's group is not ended with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process, in a session of its own: Ctrl-C is not for it."""
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def add(self, rank: int) -> None:
        self._tell(b"+%d\n" % rank)

    def remove(self, rank: int) -> None:
        """The rank has ended, and nothing of it is to be ended later."""
        self._tell(b"-%d\n" % rank)

    def close(self) -> None:
        """Ends the guard, and with it what it still guards."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _tell(self, order: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(order)
            self._process.stdin.flush()
        except OSError:
            pass  # somebody ended the guard: ranks still die with the agent


def listen() -> None:
    """Until the agent is gone or done."""
    guarded: set[int] = set()
    while order := sys.stdin.buffer.readline():
        (guarded.add if order[:1] == b"+" else guarded.discard)(int(order[1:]))
    for group in guarded:
        sweep(group)


if __name__ == "__main__":
    listen()
