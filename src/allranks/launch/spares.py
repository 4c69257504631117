"""Warm processes for restarts: each has imported what ranks import, and waits for a message that makes it a rank.

Importing torch takes most of a restart; a spare has done it while the job was training. A spare that is not needed dies
with the agent. Where anything is unusual a rank is simply started the ordinary way. `Spares` runs in the agent; the process
itself is

    python -m allranks.launch.spares ORDERS READY      (two pipes)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.launch.rank_entry import die_with_parent, main
from allranks.launch.torchrun_patches import STARTING, Starting, replaced

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


log = logging.getLogger("allranks.agent")

RANK_MODULE = "allranks.launch.rank_entry"
SPARE_MODULE = "allranks.launch.spares"
#: Spares are made when ranks have had time to get going: both import torch.
DELAY_S = 5.0
READY_S = 120.0


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    line: int  # a pipe: we write one message, then close

    def give(self, message: bytes) -> bool:
        """Whether it is that rank from now on."""
        try:
            with open(self.line, "wb") as line:
                line.write(message)
        except OSError:
            pass
        else:
            if self.process.poll() is None:
                return True
        self.process.kill()
        self.process.wait()
        return False

    def drop(self) -> None:
        os.close(self.line)
        self.process.kill()
        self.process.wait()


class Spares:
    """As many spares as ranks were started last. `take` is called by the agent, the rest runs on a thread."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self.delay_s = delay_s
        self.used = 0
        self._idle: list[_Spare] = []
        self._wanted = 0
        self._started_s = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. It lives until `close`: the kernel counts the thread that started a rank as its parent."""
        self._thread = threading.Thread(target=self._run, name="allranks-spares", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the spares that were not needed."""
        self._closed.set()
        self._wake.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for spare in idle:
            spare.drop()
        if self._thread is not None:
            self._thread.join(READY_S)

    def take(
        self, words: Sequence[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None
    ) -> subprocess.Popen[bytes] | None:
        """A process that becomes this rank now, or None: start it yourself. Counts what is needed next time."""
        self._count()
        if tuple(words[:4]) != (sys.executable, "-u", "-m", RANK_MODULE):
            return None
        message = {"argv": list(words[4:]), "environment": dict(environment), "out": stdout, "err": stderr}
        while (spare := self._pop()) is not None:
            if spare.give(json.dumps(message).encode()):
                self.used += 1
                return spare.process
        return None

    def _count(self) -> None:
        """Starts within one second belong to one round."""
        now = time.monotonic()
        with self._lock:
            self._wanted = self._wanted + 1 if now - self._started_s < 1.0 else 1
            self._started_s = now
        self._wake.set()

    def _pop(self) -> _Spare | None:
        with self._lock:
            return self._idle.pop(0) if self._idle else None

    def _run(self) -> None:
        """The thread: whatever becomes of a spare, it stays until `close`, since ranks would end with it."""
        try:
            self._keep_up()
        except Exception:  # a thread's entry
            log.exception("no more spare processes are started: restarts will be slower")
        self._closed.wait()

    def _keep_up(self) -> None:
        """Makes what is missing; returns when a spare failed."""
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._closed.is_set():
                with self._lock:
                    missing = self._wanted - len(self._idle)
                    left = self._started_s + self.delay_s - time.monotonic()
                if missing <= 0:
                    break
                if left > 0:
                    self._wake.wait(left)
                    self._wake.clear()
                    continue
                if not self._add():
                    return

    def _add(self) -> bool:
        """Starts one and waits until it is warm, so that they do not all compete with the ranks at once."""
        orders, line = os.pipe()
        ready, signal_end = os.pipe()
        try:
            command = [sys.executable, "-u", "-m", SPARE_MODULE, str(orders), str(signal_end)]
            process = subprocess.Popen(command, pass_fds=[orders, signal_end], start_new_session=True)
        except OSError as error:
            log.warning("no spare process can be started: %s", error)
            os.close(line)
            os.close(ready)
            return False
        finally:
            os.close(orders)
            os.close(signal_end)
        try:
            return self._keep(_Spare(process, line)) and self._warm(process, ready)
        finally:
            os.close(ready)

    def _keep(self, spare: _Spare) -> bool:
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(spare)
                return True
        spare.drop()
        return False

    def _warm(self, process: subprocess.Popen[bytes], ready: int) -> bool:
        """Waits until it is warm. A spare that ends instead is the last one: something is wrong with all of them."""
        deadline = time.monotonic() + READY_S
        while not self._closed.is_set() and time.monotonic() < deadline:
            if select.select([ready], [], [], 0.2)[0]:
                break
        if not self._closed.is_set() and os.read(ready, 1) != b"r":
            log.warning("a spare process (pid %d) ended: restarts will be slower", process.pid)
            return False
        return True


@contextlib.contextmanager
def serving(spares: Spares | None) -> Iterator[None]:
    """While it is open, torchrun's agent takes its rank processes from the spares, where there are any."""
    if spares is None:
        yield
        return

    def from_spares(ordinary: Starting) -> Starting:
        def popen(
            handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
        ) -> subprocess.Popen[bytes]:
            names = [getattr(stream, "name", None) for stream in (handler._stdout, handler._stderr)]
            return spares.take(args, env, *names) or ordinary(handler, args, env)

        return popen

    with replaced(STARTING, from_spares, "no spare processes are used: restarts will be slower"):
        spares.start()
        try:
            yield
        finally:
            spares.close()


#: What a rank imports sooner or later, the parts that torch loads on first use among them.
PRELOADED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "allranks.recording.recorder",
    "allranks.checkpoint.manager",
)  # fmt: skip


def wait_and_run(orders: int, ready: int) -> None:
    """Never returns: runs the rank, or exits quietly when the agent closes the pipe."""
    for name in (*PRELOADED, *filter(None, os.environ.get("ALLRANKS_PRELOAD", "").split(","))):
        try:
            importlib.import_module(name.strip())
        except ImportError:
            continue  # the script does without it, or fails by itself with its own words
    with contextlib.suppress(OSError):  # taken before it was warm: nobody waits for it
        os.write(ready, b"r")
    os.close(ready)
    with open(orders, "rb") as pipe:
        data = pipe.read()
    if not data:
        os._exit(0)
    message = json.loads(data)
    os.environ.clear()
    os.environ.update(message["environment"])
    for path, number in ((message["out"], 1), (message["err"], 2)):
        if path is not None:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, number)
            os.close(target)
    sys.argv = [sys.argv[0], *message["argv"]]
    main()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    wait_and_run(int(sys.argv[1]), int(sys.argv[2]))
