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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.soak import sandbox
from tests.soak.world import World, send

#: stream -> kind of process -> fault -> how often in a round. The faults of a stream disturb one training only, so both
#: streams run side by side; slow recoveries (a hang, an agent that starts again) are rarer.
STREAMS: dict[str, dict[str, dict[str, int]]] = {
    "replicas": {
        "rank-replicas": {"kill": 4, "stop": 3, "hang": 1, "slow": 2},
        "agent-replicas": {"kill": 1, "stop": 3, "slow": 2},
        "lighthouse": {"kill": 2, "stop": 2, "slow": 2, "partition": 2},
        "proxy-replicas": {"kill": 4, "stop": 2},
        "node": {"partition": 3, "peers": 2, "one-way": 1},
        "etcd": {"kill": 1, "stop": 2},
        "clock-replicas": {"forward": 1, "back": 1},
        "clock-lighthouse": {"forward": 1, "back": 1},
    },
    "job": {
        "rank-job": {"kill": 1, "stop": 2, "hang": 1, "slow": 2},
        "agent-job": {"kill": 1, "stop": 4},
        "helper-job": {"kill": 6, "stop": 4},
        "spare-job": {"kill": 2, "stop": 8},
        "s3": {"kill": 1, "stop": 2, "slow": 2},
        "disk": {"full": 2, "flip": 2},
        "shm": {"full": 1},
        "clock-job": {"forward": 1, "back": 1},
    },
}
#: those that an incident must report, naming the rank
REPORTED = {("rank-replicas", "kill"), ("rank-replicas", "hang"), ("rank-job", "kill"), ("rank-job", "hang")}
#: those after which a replica is not there for a while. When all are away at once their state is lost, as promised:
#: before each of them all replicas have to be there
DESTRUCTIVE = {
    ("rank-replicas", "kill"), ("rank-replicas", "hang"), ("agent-replicas", "kill"), ("node", "partition"),
    ("node", "peers"), ("node", "one-way"),
}  # fmt: skip
JUMP_S = 3600


@dataclass(frozen=True)
class Planned:
    """One fault."""

    number: int
    kind: str
    fault: str
    seconds: float
    choice: int  # which of the processes

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.fault


def plan(seed: int, stream: str, only: Collection[str] = ()) -> Iterator[Planned]:
    """Rounds of all pairs (of `only` these kinds), each in another order. The same seed gives the same plan."""
    rng = random.Random(f"{seed} {stream}")
    kinds = {kind: faults for kind, faults in STREAMS[stream].items() if not only or kind in only}
    pairs = [(kind, fault) for kind, faults in kinds.items() for fault, n in faults.items() for _ in range(n)]
    numbers = itertools.count(1)
    while pairs:
        for kind, fault in rng.sample(pairs, len(pairs)):
            seconds = 0.3 + 3.7 * rng.random() ** 2  # short ones mostly, some longer than a lease
            yield Planned(next(numbers), kind, fault, round(seconds, 2), rng.randrange(1 << 16))


def inflict(world: World, planned: Planned) -> int | None:
    """Does it and undoes it where it has an end; the process it was, or None when it cannot be done here."""
    if planned.kind in ("disk", "shm", "node") or planned.kind.startswith("clock"):
        return 0 if _PLACES[planned.kind.partition("-")[0]](world, planned) else None
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


def _disk(world: World, planned: Planned) -> bool:
    """The disk of the checkpoints is full for a while, or a byte of the newest file is another."""
    store = world.folder / "store"
    if planned.fault == "full":
        return _fill(store / "filler", planned.seconds)
    files = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 64]
    if files:
        flip(max(files, key=lambda each: each.stat().st_mtime))
    return bool(files)


def _shm(world: World, planned: Planned) -> bool:
    """No shared memory is left: black boxes cannot be made."""
    return sandbox.inside() and _fill(Path("/dev/shm/filler"), planned.seconds)


def _fill(path: Path, seconds: float) -> bool:
    if shutil.disk_usage(path.parent).free > 1 << 30:
        return False  # no small disk of our own
    try:
        with path.open("wb", buffering=0) as out:
            while out.write(b"x" * (1 << 20)):
                pass
    except OSError:
        pass
    time.sleep(seconds)
    path.unlink(missing_ok=True)
    return True


def _node(world: World, planned: Planned) -> bool:
    """The second node is cut off, or only from the first node's replicas: the lighthouses stay in reach ("peers"), or only
    connections to it are dropped ("one-way"). No connection closes."""
    if not sandbox.inside():
        return False
    if planned.fault == "partition":
        sandbox.switch("down")
        time.sleep(planned.seconds)
        sandbox.switch("up")
        return True
    with sandbox.filtering(world.ports, only_new=planned.fault == "one-way"):
        time.sleep(planned.seconds)
    return True


def _clock(world: World, planned: Planned) -> bool:
    """The wall clock of a job, or of the lighthouses, jumps by an hour and back again."""
    if world.clock is None:
        return False
    who = planned.kind.partition("-")[2]
    world.set_clock(who, JUMP_S if planned.fault == "forward" else -JUMP_S)
    time.sleep(planned.seconds)
    world.set_clock(who, 0)
    return True


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
_PLACES: dict[str, Callable[[World, Planned], bool]] = {
    "disk": _disk, "shm": _shm, "node": _node, "clock": _clock,
}  # fmt: skip
