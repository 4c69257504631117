"""Small programs that get stuck on purpose and say `ready` first. Used by the live tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREAMBLE = """
import os, sys, time, threading, ctypes, signal, subprocess, socket, queue
def ready():
    open(sys.argv[1], "w").close()
"""

ABBA = """
first, second, met = threading.Lock(), threading.Lock(), threading.Barrier(3)
def pay(mine, other):
    with mine:
        met.wait()
        with other:
            pass
for pair in ((first, second), (second, first)):
    threading.Thread(target=pay, args=pair, daemon=True).start()
met.wait()
ready()
threading.enumerate()[1].join()
"""

SELF_DEADLOCK = """
lock = threading.Lock()
def twice():
    with lock:
        ready()
        with lock:
            pass
twice()
"""

GIL_HELD = """
def driver_call():
    ctypes.PyDLL(None).sleep(1000)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
ready()
driver_call()
"""

GIL_CONTENTION = """
def tokenize():
    while True:
        sum(i * i for i in range(1000))
def crunch():
    while True:
        pass
for _ in range(6):
    threading.Thread(target=crunch, daemon=True).start()
ready()
tokenize()
"""

NATIVE = """
def driver_call():
    ctypes.CDLL(None).sleep(1000)
ready()
driver_call()
"""

SLEEP = """
def load_batch():
    time.sleep(1000)
ready()
load_batch()
"""

SUBPROCESS = """
def convert():
    subprocess.run(["sleep", "1000"])
ready()
convert()
"""

FIFO = """
path = sys.argv[1] + ".fifo"
os.mkfifo(path)
def save_checkpoint():
    with open(path, "wb") as file:
        file.write(b"x")
ready()
save_checkpoint()
"""

STDIN = """
def ask():
    input()
ready()
ask()
"""

BUSY = """
def spin():
    number = 0
    while True:
        number += 1
ready()
spin()
"""

NETWORK = """
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
def fetch():
    socket.create_connection(server.getsockname()).recv(1)
ready()
fetch()
"""

QUEUE = """
def take():
    queue.Queue().get()
ready()
take()
"""

COROUTINE = """
import asyncio
async def beat():
    while True:
        await asyncio.sleep(500)
async def next_batch():
    ready()
    await asyncio.Event().wait()
async def train():
    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    await next_batch()
asyncio.run(train())
"""

POOL_OF_ONE = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
def batch():
    ready()
    return pool.submit(time.sleep, 0).result()
def load():
    return pool.submit(batch).result()
load()
"""

FILE_LOCK = """
import fcntl
def load(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) if sys.argv[3] == "holds" else None
        ready()
        time.sleep(1000) if sys.argv[3] == "holds" else fcntl.flock(file, fcntl.LOCK_EX)
load(sys.argv[2])
"""

POOL = """
import multiprocessing
def augment(number):
    os.kill(os.getpid(), signal.SIGKILL)
def augment_all(pool):
    result = pool.map_async(augment, [1])
    while {worker.pid for worker in pool._pool} == first:
        time.sleep(0.05)
    ready()
    result.get()
pool = multiprocessing.get_context("fork").Pool(1)
first = {worker.pid for worker in pool._pool}
augment_all(pool)
"""


@dataclass
class Victim:
    """A running victim and its pid."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def victim(code: str, folder: Path, *words: str, **environment: str) -> Iterator[Victim]:
    """Runs the code as a script until it said ready; kills its whole process group at the end."""
    number = len(list(folder.glob("victim*.py")))
    script, mark = folder / f"victim{number}.py", folder / f"ready{number}"
    script.write_text(PREAMBLE + code)
    with open(folder / f"victim{number}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(mark), *words],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        wait_until(mark.exists, process)
        yield Victim(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(holds: object, process: subprocess.Popen[bytes] | None = None, limit_s: float = 60.0) -> None:
    """Waits for a condition of the outside world; fails when the process ends before it holds."""
    assert callable(holds)
    deadline = time.monotonic() + limit_s
    while not holds():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the victim ended with {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise AssertionError(f"not reached in {limit_s} s")
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def settled(pid: int) -> None:
    """Waits until a process sleeps: it has gone from `ready` into its wait."""
    wait_until(lambda: state_of(pid) in "SDT")
