"""The faults of the soak: which process (or folder, or network) and what happens to it, from a seed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak.world import World, send

#: kind of process -> what may happen to it
PLAN: dict[str, tuple[str, ...]] = {
    "rank-replicas": ("kill", "stop", "hang", "slow"),
    "rank-job": ("kill", "hang", "slow"),
    "agent-replicas": ("kill", "stop", "slow"),
    "agent-job": ("kill", "stop"),
    "lighthouse": ("kill", "stop", "slow", "partition"),
    "proxy": ("kill", "stop"),
    "helper": ("kill", "stop"),
    "spare": ("kill",),
    "etcd": ("kill", "stop"),
    "s3": ("kill", "stop", "slow"),
    "disk": ("full", "flip"),
}
#: those that an incident must report, naming the rank
REPORTED = {("rank-replicas", "kill"), ("rank-replicas", "hang"), ("rank-job", "kill")}


@dataclass(frozen=True)
class Planned:
    """One fault."""

    number: int
    kind: str
    fault: str
    seconds: float
    choice: int  # which of the processes


def plan(seed: int) -> Iterator[Planned]:
    """All pairs again and again, each time in another order. The same seed gives the same plan."""
    rng = random.Random(seed)
    pairs = [(kind, fault) for kind, faults in PLAN.items() for fault in faults]
    numbers = itertools.count(1)
    while True:
        for kind, fault in rng.sample(pairs, len(pairs)):
            yield Planned(next(numbers), kind, fault, round(rng.uniform(1.0, 4.0), 2), rng.randrange(1 << 16))


def inflict(world: World, planned: Planned) -> int | None:
    """Does it and undoes it where it has an end; the process it was, or None when there was none."""
    if planned.kind == "disk":
        _DISK[planned.fault](world, planned.seconds)
        return 0
    pids = sorted(world.pids(planned.kind))
    if not pids:
        return None
    pid = pids[planned.choice % len(pids)]
    _ACTS[planned.fault](world, planned, pid)
    return pid


def _kill(world: World, planned: Planned, pid: int) -> None:
    send([pid], signal.SIGKILL)
    if planned.kind == "lighthouse":
        place = next(i for i, each in enumerate(world.lighthouses) if each.pid == pid)
        world.lighthouses[place].wait(20)
        time.sleep(planned.seconds)
        world.start_lighthouse(place)
    elif planned.kind.startswith("agent"):
        name = next(name for name, agent in world.agents.items() if agent.pid == pid)
        world.agents[name].wait(20)
        time.sleep(planned.seconds)
        world.start_agent(name)
    elif planned.kind == "etcd" and world.etcd is not None:
        world.etcd.kill(0)
        time.sleep(planned.seconds)
        world.etcd.start(0)
        world.etcd.wait()
    elif planned.kind == "s3" and world.s3 is not None:
        world.s3.kill()
        time.sleep(planned.seconds)
        world.s3.start()


def _stop(world: World, planned: Planned, pid: int) -> None:
    send([pid], signal.SIGSTOP)
    time.sleep(planned.seconds)
    send([pid], signal.SIGCONT)


def _slow(world: World, planned: Planned, pid: int) -> None:
    """It has a fifth of the time."""
    end = time.monotonic() + planned.seconds
    while time.monotonic() < end:
        send([pid], signal.SIGSTOP)
        time.sleep(0.08)
        send([pid], signal.SIGCONT)
        time.sleep(0.02)


def _hang(world: World, planned: Planned, pid: int) -> None:
    """It waits in its own code until it is ended or five minutes are over: somebody has to notice."""
    path = world.folder / f"hang-{pid}"
    path.touch()
    timer = threading.Timer(300.0, lambda: path.unlink(missing_ok=True))
    timer.daemon = True
    timer.start()


def _partition(world: World, planned: Planned, pid: int) -> None:
    """Packets to one lighthouse's port are dropped."""
    place = next(i for i, each in enumerate(world.lighthouses) if each.pid == pid)
    table = f"soak_{os.getpid()}"
    chain = f"type filter hook input priority 0; tcp dport {world.ports[place]} drop;"
    rules = f"table inet {table} {{\nchain c {{\n{chain}\n}}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        time.sleep(planned.seconds)
    finally:
        subprocess.run(["nft", "delete", "table", "inet", table], check=True)


def _fill(world: World, seconds: float) -> None:
    """The disk of the checkpoints is full for a while (a small tmpfs, as root; else it is read-only for others)."""
    path = world.folder / "store" / "filler"
    free = shutil.disk_usage(world.folder / "store").free
    if free > 256 << 20:
        raise RuntimeError("the checkpoints' folder is no small disk: the soak needs to be root to mount one")
    with path.open("wb") as out:
        try:
            while True:
                out.write(b"x" * (1 << 20))
        except OSError:
            pass
    time.sleep(seconds)
    path.unlink(missing_ok=True)


def _flip(world: World, seconds: float) -> None:
    """One byte of the newest file of the newest checkpoint is another."""
    files = [
        path for path in (world.folder / "store").rglob("*") if path.is_file() and path.stat().st_size > 64
    ]
    if files:
        path = max(files, key=lambda each: each.stat().st_mtime)
        flip(path)


def flip(path: Path) -> None:
    """In the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


_ACTS: dict[str, Callable[[World, Planned, int], None]] = {
    "kill": _kill, "stop": _stop, "slow": _slow, "hang": _hang, "partition": _partition,
}  # fmt: skip
_DISK: dict[str, Callable[[World, float], None]] = {"full": _fill, "flip": _flip}
