"""Kills the children of ranks when the agent itself is killed, so that no orphans remain.

The kernel kills the ranks of a dead agent, but not the ranks' own children (a sleeping DataLoader worker, a command). A
small process without torch reads a pipe from the agent; when the pipe closes, it kills the registered process groups
and exits.

python orphans.py      (reads orders from stdin: "+PID" a rank has started, "-PID" its group has ended)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def sweep(group: int) -> None:
    """Kills the process group of a rank: a sleeping worker would outlive its parent and hold memory and devices."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class Guard:
    """The agent's side. Ranks lead process groups; a process that leaves its rank's group is not killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process in its own session, away from Ctrl-C."""
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def add(self, rank: int) -> None:
        self._send(b"+%d\n" % rank)

    def remove(self, rank: int) -> None:
        """The rank has ended, and none of its children remains."""
        self._send(b"-%d\n" % rank)

    def close(self) -> None:
        """Ends the process, which kills the groups that are still registered."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, order: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(order)
            self._process.stdin.flush()
        except OSError:
            pass  # the process was killed; ranks still die with the agent


def listen() -> None:
    """Reads orders until the agent is gone or done, then kills the remaining groups."""
    guarded: set[int] = set()
    while order := sys.stdin.buffer.readline():
        (guarded.add if order[:1] == b"+" else guarded.discard)(int(order[1:]))
    for group in guarded:
        sweep(group)


if __name__ == "__main__":
    listen()
