"""Spare processes for restarts: each has imported the modules of a rank, and waits for a message that makes it one.

Importing torch takes most of a restart; a spare does it while the job trains. Unused spares die with the agent. If a
spare cannot be used, the rank is started as usual. `Spares` runs in the agent; the process is

    python -m allranks.launch.spares SOCKET      (a descriptor)
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allranks.channel.worker import carefully
from allranks.launch.rank_entry import FILE, die_with_parent, main

log = logging.getLogger("allranks.agent")

SPARE_MODULE = "allranks.launch.spares"
#: Spares are started once the ranks have had time to start: both import torch.
DELAY_S = 5.0
READY_S = 120.0
POLL_S = 0.2


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    line: socket.socket  # sends one byte when warm, and receives one message

    def give(self, message: bytes) -> bool:
        """Makes the process a rank; whether that succeeded."""
        try:
            with self.line:
                self.line.sendall(message)
        except OSError:
            pass
        else:
            if self.process.poll() is None:
                return True
        self.drop()
        return False

    def drop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()


class Spares:
    """Keeps as many spares as ranks were started last, on a thread; the agent calls `take`."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self.delay_s = delay_s
        self.used = 0
        self._idle: list[_Spare] = []
        self._wanted = 0
        self._started_s = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, which runs until `close`: for the kernel the thread that started a rank is its parent."""
        self._thread = threading.Thread(target=self._run, name="allranks-spares", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the unused spares."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(READY_S)
        while self._idle:
            self._idle.pop().drop()

    def take(
        self, words: Sequence[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None
    ) -> subprocess.Popen[bytes] | None:
        """A process that becomes this rank; None: the caller starts it. Counts the spares needed next time."""
        now = time.monotonic()
        with self._changed:  # starts within one second are of one round
            self._wanted = self._wanted + 1 if now - self._started_s < 1.0 else 1
            self._started_s = now
            self._changed.notify_all()
        if tuple(words[:3]) != (sys.executable, "-u", FILE):
            return None
        message = {"argv": list(words[3:]), "environment": dict(environment), "out": stdout, "err": stderr}
        while (spare := self._pop()) is not None:
            if spare.give(json.dumps(message).encode()):
                self.used += 1
                return spare.process
        return None

    def _pop(self) -> _Spare | None:
        with self._changed:
            return self._idle.pop(0) if self._idle else None

    def _run(self) -> None:
        """The thread. Runs until `close` even after an error, since the ranks that it started would end with it."""
        carefully(self._keep_up, "no more spare processes are started: restarts will be slower")
        with self._changed:
            self._changed.wait_for(lambda: self._closed)

    def _keep_up(self) -> None:
        """Starts missing spares; returns when one failed."""
        while self._wait_until_due() and self._add():
            pass

    def _wait_until_due(self) -> bool:
        """Waits until a spare is missing and the ranks have had time to start; False after `close`."""
        with self._changed:
            while not self._closed:
                left_s = self._started_s + self.delay_s - time.monotonic()
                missing = self._wanted > len(self._idle)
                if missing and left_s <= 0:
                    return True
                self._changed.wait(left_s if missing else None)
        return False

    def _add(self) -> bool:
        """Starts one spare and waits until it is warm, so that they do not all compete with the ranks. False when it failed:
        then no more are started."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-m", SPARE_MODULE, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        spare, deadline = _Spare(process, ours), time.monotonic() + READY_S
        while not (ready := select.select([ours], [], [], POLL_S)[0]):
            if self._closed or time.monotonic() > deadline:
                break
        warm = bool(ready) and ours.recv(1) == b"r"
        with self._changed:
            if warm and not self._closed:
                self._idle.append(spare)
                return True
        spare.drop()
        if not self._closed:
            log.warning("a spare process (pid %d) ended: restarts will be slower", process.pid)
        return False


#: Modules that a rank imports, including those that torch loads on first use.
PRELOADED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "allranks.recording.recorder",
    "allranks.checkpoint.manager",
)  # fmt: skip


def wait_and_run(agent: socket.socket) -> None:
    """Runs the rank, or exits when the agent closes the connection. Does not return."""
    for name in (*PRELOADED, *filter(None, os.environ.get("ALLRANKS_PRELOAD", "").split(","))):
        try:
            importlib.import_module(name.strip())
        except ImportError:
            continue  # the script does not need it, or reports the error itself
    with agent, agent.makefile("rb") as message:
        agent.sendall(b"r")
        data = message.read()
    if not data:
        os._exit(0)
    rank = json.loads(data)
    os.environ.clear()
    os.environ.update(rank["environment"])
    for path, number in ((rank["out"], 1), (rank["err"], 2)):
        if path is not None:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, number)
            os.close(target)
    sys.argv = [sys.argv[0], *rank["argv"]]
    main()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    wait_and_run(socket.socket(fileno=int(sys.argv[1])))
