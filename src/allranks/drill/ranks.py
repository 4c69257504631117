"""Real ranks in forked processes of a caller that has imported torch.

`import torch` costs seconds and 230 MB per process; a fork costs milliseconds and 18 MB. The caller must not have started torch
threads (no process group, no DataLoader). Each rank is a child that runs `function(rank, world_size, *args)` and returns its
result.

    with Ranks(train, world_size=4) as ranks:
        ranks.wait_for("ready")         # every rank called signal("ready")
        ranks.kill(2)                   # SIGKILL
        results = ranks.join(timeout_s=20)
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal as signals
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.channel.frames import HeldPort, loopback
from allranks.launch.rank_entry import die_with_parent

_mark: Callable[[str], None] | None = None


def signal(name: str) -> None:
    """Notifies the parent that this rank has reached `name`. Called in a rank."""
    if _mark is not None:
        _mark(name)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. `exit_code` is negative for a signal; `error` holds the traceback."""

    rank: int
    exit_code: int
    value: Any = None
    error: str = ""


@dataclass
class Ranks:
    """A set of forked ranks. `start()` forks them, `close()` kills and reaps the remaining ones."""

    function: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...] = ()
    backend: str | None = "gloo"  # None: without a process group
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0  # of the process group
    pids: dict[int, int] = field(default_factory=dict)
    _pipes: dict[int, int] = field(default_factory=dict)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _port: HeldPort | None = None

    def __enter__(self) -> Ranks:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="allranks-ranks-")
        self._port = HeldPort()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.world_size):
            self._fork(rank, self._port.number)

    def wait_for(self, name: str, ranks: list[int] | None = None, timeout_s: float = 30.0) -> None:
        """Waits until these ranks (default: all) have called `signal(name)`."""
        wanted = set(range(self.world_size) if ranks is None else ranks)
        deadline = time.monotonic() + timeout_s
        while True:
            missing = {rank for rank in wanted if not self._mark_path(rank, name).exists()}
            if not missing:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(missing)} did not reach {name!r} in {timeout_s} s")
            time.sleep(0.005)

    def kill(self, rank: int, number: int = signals.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def join(self, timeout_s: float = 60.0) -> dict[int, Outcome]:
        """Waits for all ranks; ranks that still run at the limit are killed and have exit code -9."""
        deadline = time.monotonic() + timeout_s
        return {rank: self._collect(rank, deadline) for rank in sorted(self.pids)}

    def values(self, timeout_s: float = 60.0) -> list[Any]:
        """Waits for all ranks, raises if any failed, and returns their values in rank order."""
        outcomes = self.join(timeout_s)
        bad = [outcome for outcome in outcomes.values() if outcome.exit_code != 0]
        if bad:
            raise RuntimeError("; ".join(f"rank {o.rank} exited {o.exit_code}: {o.error}" for o in bad))
        return [outcomes[rank].value for rank in sorted(outcomes)]

    def close(self) -> None:
        for rank in list(self.pids):
            self._collect(rank, 0.0)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        if self._port is not None:
            self._port.close()

    def _fork(self, rank: int, port: int) -> None:
        read_end, write_end = os.pipe()
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        pid = os.fork()
        if pid == 0:
            if parent is not None:  # the kernel watches the thread that forked, not its process
                die_with_parent(parent)
            os.close(read_end)
            for fd in self._pipes.values():
                os.close(fd)
            self._run_child(rank, port, write_end)
        os.close(write_end)
        self.pids[rank] = pid
        self._pipes[rank] = read_end

    def _run_child(self, rank: int, port: int, write_end: int) -> None:
        global _mark
        code = 1
        try:
            gc.freeze()  # garbage of the parent may hold descriptors that are in use here
            if torch := sys.modules.get(
                "torch"
            ):  # renews the thread pool before the threads of a backward do
                torch.set_num_threads(torch.get_num_threads())
            # without the handlers and the alarm of pytest
            signals.setitimer(signals.ITIMER_REAL, 0)
            for number in (signals.SIGALRM, signals.SIGINT, signals.SIGTERM):
                signals.signal(number, signals.SIG_DFL)
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.world_size),
                LOCAL_WORLD_SIZE=str(self.world_size), MASTER_ADDR=loopback(), MASTER_PORT=str(port),
            )  # fmt: skip
            os.environ.update(self.env)
            _mark = lambda name: self._mark_path(rank, name).touch()  # noqa: E731
            value = self._call(rank)
            payload = pickle.dumps((value, ""))
            code = 0
        except BaseException:
            payload = pickle.dumps((None, traceback.format_exc()))
        try:
            with os.fdopen(write_end, "wb") as out:
                out.write(payload)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _call(self, rank: int) -> Any:
        if self.backend is None:
            return self.function(rank, self.world_size, *self.args)
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(self.backend, timeout=timedelta(seconds=self.timeout_s))
        # a rank that ends before all are connected would break connections that others still make
        self._mark_path(rank, "connected").touch()
        self.wait_for("connected", timeout_s=self.timeout_s)
        value = self.function(rank, self.world_size, *self.args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return value

    def _collect(self, rank: int, deadline: float) -> Outcome:
        """Reads the result, then reaps the process; kills it at the deadline."""
        pid, fd = self.pids.pop(rank), self._pipes.pop(rank)
        chunks = []
        while True:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([fd], [], [], max(0.0, min(left, 0.1)))
            if readable:
                chunk = os.read(fd, 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return self._outcome(rank, status, fd, chunks)
            if left <= 0:
                os.kill(pid, signals.SIGKILL)
                break
        _, status = os.waitpid(pid, 0)
        return self._outcome(rank, status, fd, chunks)

    def _outcome(self, rank: int, status: int, fd: int, chunks: list[bytes]) -> Outcome:
        os.set_blocking(fd, False)
        try:
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
        except BlockingIOError:
            pass
        os.close(fd)
        value, error = pickle.loads(b"".join(chunks)) if chunks else (None, "")
        return Outcome(rank, os.waitstatus_to_exitcode(status), value, error)

    def _mark_path(self, rank: int, name: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{name}.{rank}"
