"""Real faults that a rank injects into itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PIDFD_GETFD = 438  # the system call's number on every architecture
PARTITION_S = 3.0
STEP = "step"  # the default phase of a fault


def inject(kind: str, for_s: float) -> None:
    """Injects a fault. Returns only for faults that end (slow, pause, or a hang with a limit)."""
    FAULTS[kind].act(for_s)


def _stop(for_s: float) -> None:
    if for_s:
        _stop_for([os.getpid()], for_s)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def load_batch_from_slow_storage(for_s: float) -> None:
    """Named like user code that waits for storage."""
    time.sleep(for_s or 1e9)


def _busy(for_s: float) -> None:
    deadline = time.monotonic() + (for_s or 1e9)
    count = 0
    while time.monotonic() < deadline:
        count += 1


def _lock(for_s: float) -> None:
    one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            both.wait()
            with second:
                pass

    threads = [threading.Thread(target=take, args=pair, daemon=True) for pair in ((one, two), (two, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(for_s or None)


def _loader(for_s: float) -> None:
    from torch.utils.data import DataLoader, Dataset

    class Sleepy(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(for_s or 1e6)
            return index

    next(iter(DataLoader(Sleepy(), num_workers=1)))


def _raise(for_s: float) -> None:
    raise RuntimeError("a fault of the plan: this rank raises")


def _gil(for_s: float) -> None:
    ctypes.PyDLL(None).sleep(int(for_s) or 100_000)  # PyDLL keeps the GIL during the call


def _subprocess(for_s: float) -> None:
    import subprocess

    subprocess.run([sys.executable, "-c", f"import time; time.sleep({for_s or 1e6})"], check=False)


def _queue(for_s: float) -> None:
    import queue

    with contextlib.suppress(queue.Empty):
        queue.Queue[int]().get(timeout=for_s or None)


def _extra(for_s: float) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))


def _fifo(for_s: float) -> None:
    read_end, write_end = os.pipe()
    try:
        while True:
            os.write(write_end, b"checkpoint" * 10_000)
    finally:
        os.close(read_end)
        os.close(write_end)


def _file_lock(for_s: float) -> None:
    import fcntl
    import tempfile

    with tempfile.NamedTemporaryFile() as held, open(held.name) as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        fcntl.flock(wanted, fcntl.LOCK_EX)  # waits for the first descriptor of the same file


def _network(for_s: float) -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as line,
    ):
        line.settimeout(for_s or None)
        line.recv(1)


def _store(for_s: float) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    patience = timedelta(seconds=for_s or 1e6)
    TCPStore("127.0.0.1", 0, is_master=True, timeout=patience).wait(["a key without a value"], patience)


def _recv(for_s: float) -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.empty(1), src=(dist.get_rank() + 1) % dist.get_world_size())


def _pause(for_s: float) -> None:
    """Uses CPU without Python progress, like a long garbage collection."""
    deadline = time.monotonic() + (for_s or 3.0)
    numbers = list(range(200_000))
    while time.monotonic() < deadline:
        numbers.sort(key=lambda n: -n)


def _partition(for_s: float) -> None:
    """Cuts all TCP connections of this rank and its helpers for some seconds.

    New connections of the rank are cut again; helpers are stopped first, so that they make none.
    """
    from allranks.stacktraces.procfs import children_of

    length_s = for_s or PARTITION_S
    deadline = time.monotonic() + length_s
    helpers = children_of(os.getpid())
    if helpers:
        _stop_for(helpers, length_s)
    for pid in (*helpers, os.getpid()):
        _cut_connections(pid)

    def keep_cutting() -> None:
        while time.monotonic() < deadline:
            _cut_connections(os.getpid())
            time.sleep(0.02)

    threading.Thread(target=keep_cutting, name="partition", daemon=True).start()


def _stop_for(pids: list[int], seconds: float) -> None:
    """Stops processes. A separate process continues them, even if this rank has ended."""
    import subprocess

    names = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {names} 2>/dev/null"], start_new_session=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _cut_connections(pid: int) -> int:
    """Shuts down all connections of a process; returns their number."""
    try:
        copies = [_copy_of(pid, int(name)) for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return 0
    return sum(_shut(fd) for fd in copies if fd >= 0)


def _shut(fd: int) -> bool:
    """Shuts down the connection of a descriptor and closes the descriptor; False if it is not a TCP connection."""
    import socket

    try:
        copy = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return False
    try:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return False
        copy.getpeername()
        copy.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        copy.close()


def _copy_of(pid: int, fd: int) -> int:
    """A duplicate of another process's descriptor, or -1."""
    try:
        if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
            return -1
        if pid == os.getpid():
            return os.dup(fd)
        handle = os.pidfd_open(pid)
    except OSError:
        return -1
    try:
        return int(ctypes.CDLL(None).syscall(PIDFD_GETFD, handle, fd, 0))
    finally:
        os.close(handle)


class FaultKind(NamedTuple):
    """`act(for_s)` injects the fault; `causes` are the causes of a right verdict, none if no verdict is expected."""

    act: Callable[[float], object]
    text: str
    causes: frozenset[str]


_DEATH = frozenset({"rank_died"})
_HANG = frozenset({"missing_rank", "stuck_before_collective"})
_NOTHING: frozenset[str] = frozenset()
FAULTS = {
    "kill": FaultKind(lambda for_s: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL to the rank", _DEATH),
    "exit": FaultKind(lambda for_s: os._exit(3), "the rank exits without shutting down", _DEATH),
    "segfault": FaultKind(lambda for_s: ctypes.string_at(0), "the rank crashes in native code", _DEATH),
    "raise": FaultKind(_raise, "an exception ends the rank", frozenset({"call_error", "rank_died"})),
    "stop": FaultKind(_stop, "SIGSTOP: the process freezes", _HANG | {"rank_died", "stopped"}),
    "hang": FaultKind(load_batch_from_slow_storage, "the data loading code sleeps for ever", _HANG | {"sleep"}),
    "busy": FaultKind(_busy, "an endless Python loop", _HANG | {"busy_python"}),
    "lock": FaultKind(_lock, "two threads deadlock, the main thread joins them", _HANG | {"lock_deadlock"}),
    "gil": FaultKind(_gil, "C code sleeps and keeps the GIL", _HANG | {"gil_held_native"}),
    "loader": FaultKind(_loader, "a DataLoader worker process sleeps", _HANG | {"dataloader_wait"}),
    "subprocess": FaultKind(_subprocess, "the rank waits for a subprocess", _HANG | {"subprocess_wait"}),
    "queue": FaultKind(_queue, "the rank waits on an empty queue", _HANG | {"queue_wait"}),
    "fifo": FaultKind(_fifo, "the rank writes to a pipe without a reader", _HANG | {"checkpoint_io", "pipe_write_blocked"}),
    "file_lock": FaultKind(_file_lock, "the rank waits for a file lock", _HANG | {"file_lock_wait"}),
    "network": FaultKind(_network, "the rank reads from a server that is silent", _HANG | {"network_io"}),
    "store": FaultKind(_store, "the rank waits for a key of a store", _HANG | {"store_wait"}),
    "recv": FaultKind(_recv, "the rank receives a message that no rank sends (needs a process group)", _HANG | {"p2p_mismatch", "p2p_wait"}),
    "extra": FaultKind(_extra, "the rank makes an extra collective (needs a process group)", frozenset({"extra_collective", "size_mismatch", "type_mismatch"})),
    "slow": FaultKind(lambda for_s: time.sleep(for_s or 1.0), "each step of the rank takes longer", _NOTHING),
    "pause": FaultKind(_pause, "one long garbage-collector-like pause", _NOTHING),
    "leave": FaultKind(lambda for_s: sys.exit(0), "the rank exits with code 0", _NOTHING),
    "partition": FaultKind(_partition, "the connections of the rank and its helpers are cut", frozenset({"missing_rank", "none_finished", "rank_died"})),
}  # fmt: skip


def around(
    target: object,
    name: str,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Wraps one method of one object."""
    real = getattr(target, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        if before is not None:
            before()
        result = real(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(target, name, wrapped)
