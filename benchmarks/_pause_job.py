"""A small training in which one rank pauses, or hangs in the same way, for `benchmarks/pauses.py`.

    _pause_job.py OUT KIND SECONDS GUILTY MARKS AT_STEP        SECONDS 0: for ever

Each kind is one function: how such a pause comes about, and how the same thing never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import mmap
import multiprocessing
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import allranks

OUT, KIND, SECONDS = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
GUILTY, MARKS, AT_STEP = int(sys.argv[4]), sys.argv[5] == "marks", int(sys.argv[6])
RANK = int(os.environ.get("ALLRANKS_RANK") or os.environ["RANK"])
END = time.monotonic() + 1e9
AFTER = 15  # steps that follow a pause


def until_the_end() -> Iterator[int]:
    """Rounds until the pause is over."""
    count = 0
    while time.monotonic() < END:
        yield count
        count += 1


def later(command: str) -> None:
    """Runs a command of the shell when the pause is over; never in a hang."""
    if SECONDS:
        subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; {command}"], start_new_session=True)


# kinds that the rules were made with


def retry() -> None:
    """Tries again and again, with longer and longer sleeps between."""
    for attempt in until_the_end():
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=2)
        except OSError:
            time.sleep(max(0.1, min(2.0**attempt, 10.0, END - time.monotonic())))


def collect() -> None:
    """Collects garbage; or a finalizer wants the lock that is held while garbage is collected."""
    if SECONDS:
        junk = [[] for _ in range(200_000)]
        for one in junk:
            one.append(junk)
        for _ in until_the_end():
            gc.collect()
        return
    lock = threading.Lock()

    class Handle:
        def __del__(self) -> None:
            with lock:
                pass

    handle = Handle()
    handle.itself = handle
    del handle
    with lock:
        gc.collect()


def compile_() -> None:
    """A compiler that takes long, or finds no end."""

    def slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        for _ in until_the_end():
            graph.graph.lint()
        return graph.forward

    torch.compile(lambda x: x * 2 + 1, backend=slow)(torch.ones(3))


def save() -> None:
    """Writes and waits for the disk; or writes to a pipe that nobody reads."""
    if SECONDS:
        for _ in until_the_end():
            with open(OUT / f"save.{RANK}", "wb") as file:
                file.write(os.urandom(1 << 22))
                os.fsync(file.fileno())
        return
    os.mkfifo(OUT / "pipe")
    with open(OUT / "pipe", "wb") as file:
        file.write(b"state")


def memory() -> None:
    """Pages come back one by one; or a chain of indices has no end."""
    if SECONDS:
        area = mmap.mmap(-1, 1 << 26)
        for _ in until_the_end():
            area.madvise(mmap.MADV_DONTNEED)
            for offset in range(0, 1 << 26, mmap.PAGESIZE):
                area[offset] = 1
        return
    follows = [*range(1, 100_000), 7]
    at = 0
    while at >= 0:
        at = follows[at]


def stopped() -> None:
    """The process is stopped, as by a debugger or a scheduler."""
    later(f"kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def lock() -> None:
    """Another thread holds the lock for long; or it ended with the lock held."""
    held, taken = threading.Lock(), threading.Event()

    def hold() -> None:
        held.acquire()
        taken.set()
        if SECONDS:
            time.sleep(SECONDS)
            held.release()

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    held.acquire()


def command() -> None:
    """A command that takes long; or one that waits for a line of input."""
    if SECONDS:
        subprocess.run(["sleep", str(SECONDS)], check=True)
        return
    subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE).wait()


class Slow(Dataset):
    """Its worker takes long for a sample, or waits for a lock that was taken before the fork."""

    inherited = threading.Lock()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        if not SECONDS:
            self.inherited.acquire()
        for _ in until_the_end():
            time.sleep(0.5)
        return index


def loader() -> None:
    """A data loader."""
    Slow.inherited.acquire()
    next(iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")))


def network() -> None:
    """A server that answers late, or never."""
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as line:
        accepted, _ = server.accept()
        if SECONDS:
            threading.Timer(SECONDS, accepted.send, [b"x"]).start()
        line.recv(1)


# kinds that were written after the rules, and that no rule was changed for


def first_import() -> None:
    """A module that takes long when it is imported; or it waits for a thread that imports it too."""
    endless = "import threading\nthread = threading.Thread(target=__import__, args=(__name__,))\nthread.start()\nthread.join()\n"
    slow = f"import hashlib, time\nend = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: hashlib.sha256(bytes(9999))\n"
    (OUT / "large_module.py").write_text(slow if SECONDS else endless)
    sys.path.insert(0, str(OUT))
    importlib.import_module("large_module")


def build_lock() -> None:
    """Waits until another process has built an extension; or its lock was left behind."""
    from torch.utils.file_baton import FileBaton

    (OUT / "lock").touch()
    later(f"rm {OUT / 'lock'}")
    FileBaton(str(OUT / "lock"), wait_seconds=0.1).wait()


def tokenize(part: int) -> int:
    """In a worker of a pool: takes long, or is killed."""
    if not SECONDS:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in until_the_end():
        sum(range(1000))
    return part


def pool() -> None:
    """A pool of processes; or its worker was killed, and nobody says so."""
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.apply(tokenize, (1,))


def database() -> None:
    """A database that another has locked: asked again every second."""
    other = sqlite3.connect(OUT / "cache.db", isolation_level=None, check_same_thread=False)
    other.execute("create table if not exists t (x)")
    other.execute("begin exclusive")
    if SECONDS:
        threading.Timer(SECONDS, other.execute, ["commit"]).start()
    mine = sqlite3.connect(OUT / "cache.db", timeout=1.0)
    while True:
        try:
            mine.execute("insert into t values (1)")
            return
        except sqlite3.OperationalError:
            continue


async def reply() -> None:
    """What a coroutine waits for: comes late, or never."""
    answered = asyncio.Event()
    if SECONDS:
        asyncio.get_running_loop().call_later(SECONDS, answered.set)
    await answered.wait()


def event_loop() -> None:
    """An event loop."""
    asyncio.run(reply())


def executor() -> None:
    """A thread of a pool that works; or it waits for another task of the same pool, which has one thread."""
    with ThreadPoolExecutor(1) as threads:

        def outer() -> int:
            if SECONDS:
                return sum(1 for _ in until_the_end() if not time.sleep(0.2))
            return threads.submit(int).result()

        threads.submit(outer).result()


def pattern() -> None:
    """Regular expressions that take long; or one that takes for ever."""
    for _ in until_the_end():
        re.match(r"(a+)+$", "a" * (21 if SECONDS else 300) + "b")


def walk() -> None:
    """Reads a folder again and again; or follows links that lead back."""
    (OUT / "data" / "part").mkdir(parents=True)
    if not SECONDS:
        for number in range(4):
            (OUT / "data" / "part" / f"link{number}").symlink_to("../..")
    for _ in until_the_end():
        for _folder, _, _files in os.walk(OUT / "data", followlinks=True):
            pass


SERVER = """
import http.server, sys, time
end = time.monotonic() + (float(sys.argv[1]) or 1e9)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"done" if time.monotonic() > end else b"pending"
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
server.serve_forever()
"""


def polling() -> None:
    """Asks a service every half second whether a job is done."""
    code = [sys.executable, "-c", SERVER, str(SECONDS)]
    service = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{service.stdout.readline().strip()}"
    while urllib.request.urlopen(address, timeout=5).read() != b"done":
        time.sleep(0.5)
    service.kill()


def piped() -> None:
    """Waits for a command whose output nobody reads: it takes long, or its pipe is full."""
    script = f"sleep {SECONDS}" if SECONDS else "head -c 1000000 /dev/zero"
    subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE).wait()


KNOWN = (retry, collect, compile_, save, memory, stopped, lock, command, loader, network)
HELD_OUT = (
    *(first_import, build_lock, pool, database, event_loop),
    *(executor, pattern, walk, polling, piped),
)
KINDS = {kind.__name__.strip("_"): kind for kind in (*KNOWN, *HELD_OUT)}


def disturb(step: int) -> None:
    """The pause, once and in one rank."""
    global END
    if RANK != GUILTY or step < AT_STEP or (OUT / "began").exists():
        return
    END = time.monotonic() + (SECONDS or 1e9)
    (OUT / "began").write_text(str(time.time()))
    KINDS[KIND]()
    (OUT / "ended").write_text(str(time.time()))


def train_replicas(model: nn.Module, batch: torch.Tensor) -> None:
    """With a Manager: ends some steps after the paused replica is back."""
    from allranks.manager.ddp import DistributedDataParallel
    from allranks.manager.manager import Manager
    from allranks.manager.optimizer import Optimizer

    manager = Manager(
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1e-4))
    stop, back = OUT / "stop_at", 0
    while not stop.exists() or manager.current_step() < int(stop.read_text() or "1000000"):
        disturb(manager.current_step())
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        back += (OUT / "ended").exists()
        if RANK == GUILTY and back == AFTER:
            (OUT / "stop").write_text(str(manager.current_step() + AFTER))
            (OUT / "stop").replace(stop)
        time.sleep(0.1)
    manager.shutdown()


def train(model: nn.Module, batch: torch.Tensor) -> None:
    """Plain DDP."""
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(AT_STEP + AFTER):
        if MARKS:
            allranks.step(step)
        disturb(step)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.1)
    dist.destroy_process_group()


def main() -> None:
    """Trains."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with contextlib.suppress(KeyboardInterrupt):
        (train_replicas if "REPLICA_GROUP_ID" in os.environ else train)(model, torch.randn(8, 64))


if __name__ == "__main__":
    main()
