"""The lighthouse against torchft's Rust lighthouse, in one run on one machine.

    python benchmarks/lighthouse.py [--quick] [--json] [--soak SECONDS]

Measured: server CPU per paced heartbeat at 1,000 connections; quorum latency; push of a failure notice to
1,000 connections; memory per 1,000 connections; kill -9, SIGSTOP and a line gone silent until every survivor
has the notice. With --soak, 10,000 replicas are held under load while unknown clients crowd the door, and false deaths
are counted. Clients and server share the machine, for both sides alike; CPU times are the server's only. The push
is measured alternately with its floor, a bare loop that writes the same bytes to the same clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _lighthouse_crowd import LOST, WELCOME, Crowd
from _lighthouse_deaths import deaths
from _lighthouse_server import cpu_s, lighthouse, rss_mb
from _lighthouse_soak import soak
from _lighthouse_torchft import GrpcCrowd, find_server, start
from allranks.channel.frames import HeldPort
from allranks.lighthouse.connection import raise_open_files


def main() -> int:
    """Runs everything and prints a table, or one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="within 60 s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="S", help="hold 10,000 replicas for so long, under load"
    )
    args = parser.parse_args()
    raise_open_files()
    say = (
        (lambda text: print(text, file=sys.stderr, flush=True))
        if args.json
        else (lambda text: print(text, flush=True))
    )
    numbers: dict[str, Any] = {}
    if args.soak:
        numbers.update(soak(args.soak, 10_000))
    else:
        numbers.update(ours(args.quick, say))
        script = find_server()
        if script is None:
            say("torchft could not be installed here: left out")
        else:
            numbers.update(asyncio.run(theirs(script, args.quick, say)))
    for name, value in numbers.items():
        say(f"{name:<44} {value}")
    found = ratios(numbers)
    for name, value in found.items():
        say(f"ratio {name:<38} {value}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        print(json.dumps({"name": "lighthouse", "ratios": found, "numbers": numbers, "machine": machine}))
    return 0


def ratios(numbers: dict[str, Any]) -> dict[str, float]:
    """Ours over theirs; below 1 is better. The push over its floor: 1 is all that can be had."""
    found = {}
    for name, value in numbers.items():
        other = numbers.get(f"torchft_{name}")
        if isinstance(value, float) and isinstance(other, float) and other > 0:
            found[name] = round(value / other, 4)
    if floor := numbers.get("push_1000_floor_p99_ms"):
        found["push_1000_over_floor"] = round(numbers["push_1000_p99_ms"] / floor, 3)
    return found


# ---- ours ---------------------------------------------------------------------------------------------------


def ours(quick: bool, say: Any) -> dict[str, Any]:
    """All numbers of our lighthouse."""
    numbers: dict[str, Any] = {}
    with lighthouse("--min-replicas", "1000", "--heartbeat-timeout-ms", "30000") as (address, pid):
        before = rss_mb(pid)
        crowd = Crowd(address, 1000)
        crowd.join_all(0)
        numbers["memory_mb_per_1000"] = round(rss_mb(pid) - before, 2)
        numbers["heartbeat_cpu_us"] = round(paced(crowd, pid, 4.0 if quick else 20.0), 2)
        say("heartbeats done")
        numbers.update(push(crowd, pid, 10 if quick else 30))
        crowd.close()
    say("pushes done")
    for size in (10, 100, 1000, 2000):
        with lighthouse("--min-replicas", str(size), "--heartbeat-timeout-ms", "60000") as (address, pid):
            crowd = Crowd(address, size)
            crowd.join_all(0)
            began, rounds = cpu_s(pid), 5 if quick else 11
            times = [crowd.join_all(step + 1) for step in range(rounds)]
            numbers[f"quorum_{size}_s"] = round(statistics.median(times), 5)
            numbers[f"quorum_{size}_server_cpu_s"] = round((cpu_s(pid) - began) / rounds, 5)
            crowd.close()
    say("quorums done")
    numbers.update(deaths((3, 1) if quick else (15, 3), say))
    return numbers


def paced(crowd: Crowd, pid: int, seconds: float, per_second: int = 1000) -> float:
    """Server CPU per heartbeat, in microseconds; heartbeats arrive singly, evenly spread."""
    lights = list(crowd.lights.values())
    began, start_cpu, sent = time.perf_counter(), cpu_s(pid), 0
    while (now := time.perf_counter() - began) < seconds:
        due = int(now * per_second)
        while sent < due:
            crowd.beat(lights[sent % len(lights)], sent)
            sent += 1
        crowd.pump(0.0005)
    time.sleep(0.2)
    return (cpu_s(pid) - start_cpu) / sent * 1e6


def push(crowd: Crowd, pid: int, rounds: int) -> dict[str, Any]:
    """One member closes its line; milliseconds until the 990th and the last of 999 others has read the notice, alternating
    with the same clients on a bare epoll loop that does nothing but write the same bytes."""
    found, floors, spent = [], [], 0.0
    with bare_loop() as bare:
        for step in range(rounds):
            began = cpu_s(pid)
            name, times = one_push(crowd)
            found.append(times)
            crowd.settle(0.05)
            spent += cpu_s(pid) - began
            crowd.connect(name)
            crowd.join_all(step + 1)
            name, times = one_push(bare)
            floors.append(times)
            bare.wait(WELCOME, {bare.connect(name).sock.fileno()}, 30.0)
            bare.settle(0.05)
    return {
        "push_1000_p99_ms": round(statistics.median(map(p99, found)), 2),
        "push_1000_last_ms": round(statistics.median(times[-1] for times in found), 2),
        "push_1000_server_cpu_ms": round(1000 * spent / rounds, 2),
        "push_1000_floor_p99_ms": round(statistics.median(map(p99, floors)), 2),
    }


@contextmanager
def bare_loop() -> Iterator[Crowd]:
    """1,000 clients of the floor."""
    script = Path(__file__).with_name("_lighthouse_floor.py")
    floor = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert floor.stdout is not None
    crowd = Crowd(floor.stdout.readline().strip(), 1000)
    try:
        yield crowd
    finally:
        floor.communicate(timeout=20)
        crowd.close()


def one_push(crowd: Crowd) -> tuple[str, list[float]]:
    """(who closed, milliseconds until each of the others had read the notice, sorted)."""
    victim = next(iter(crowd.lights.values()))
    times: list[float] = []
    began = time.perf_counter()
    crowd.drop(victim)
    crowd.wait(LOST, set(crowd.lights), 30.0, lambda fd: times.append(1000 * (time.perf_counter() - began)))
    return victim.name, sorted(times)


def p99(times: list[float]) -> float:
    """The time after which 99 of 100 were through."""
    return times[int(len(times) * 0.99) - 1]


# ---- torchft ------------------------------------------------------------------------------------------------


async def theirs(script: Path, quick: bool, say: Any) -> dict[str, Any]:
    """The same numbers of torchft's lighthouse, as far as it has them."""
    try:
        import grpc  # noqa: F401
    except ImportError:
        say("grpcio is not installed: torchft left out")
        return {}
    numbers: dict[str, Any] = {}
    async with torchft(script, 1000) as (port, pid):
        before = rss_mb(pid)
        crowd = GrpcCrowd(port, 1000)
        await crowd.open()
        numbers["torchft_memory_mb_per_1000"] = round(rss_mb(pid) - before, 2)
        numbers["torchft_heartbeat_cpu_us"] = round(await paced_grpc(crowd, pid, 4.0 if quick else 20.0), 2)
        await quorum_rounds(crowd, pid, 1 if quick else 3, numbers)
        await crowd.close()
    say("torchft's heartbeats done")
    for size in () if quick else (10, 100, 2000):
        async with torchft(script, size) as (port, pid):
            crowd = GrpcCrowd(port, size)
            await crowd.open()
            await quorum_rounds(crowd, pid, 3, numbers)
            await crowd.close()
    say("torchft's quorums done")
    async with torchft(script, 1) as (port, _):
        crowd = GrpcCrowd(port, 2)
        await crowd.open()
        await crowd.quorum(0)
        # the other never asks again: it is dead
        numbers["torchft_kill_s"] = round(await crowd.one_quorum(0, 1), 3)
        await crowd.close()
    return numbers


class torchft:
    """A torchft lighthouse that answers."""

    def __init__(self, script: Path, min_replicas: int) -> None:
        self._script, self._min, self._held = script, min_replicas, HeldPort()
        self._port = self._held.number

    async def __aenter__(self) -> tuple[int, int]:
        self._process = start(self._script, self._port, self._min)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # no heartbeat as a probe: it would count as a replica for 5 s
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self._port, self._process.pid
            except OSError:
                await asyncio.sleep(0.05)
        raise TimeoutError("torchft's lighthouse does not listen")

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(20)


async def quorum_rounds(crowd: GrpcCrowd, pid: int, rounds: int, numbers: dict[str, Any]) -> None:
    """Everybody asks, some times."""
    if crowd.size < 1000:
        await crowd.quorum(0)
    began = cpu_s(pid)
    times = [await crowd.quorum(step + 1) for step in range(rounds)]
    numbers[f"torchft_quorum_{crowd.size}_s"] = round(statistics.median(times), 5)
    numbers[f"torchft_quorum_{crowd.size}_server_cpu_s"] = round((cpu_s(pid) - began) / rounds, 5)


async def paced_grpc(crowd: GrpcCrowd, pid: int, seconds: float, per_second: int = 1000) -> float:
    """Server CPU per heartbeat, in microseconds."""
    began, start_cpu, sent = time.perf_counter(), cpu_s(pid), 0
    tasks: set[asyncio.Task[None]] = set()
    while (now := time.perf_counter() - began) < seconds:
        due = int(now * per_second)
        while sent < due and len(tasks) < 500:
            task = asyncio.create_task(crowd.beat(sent % crowd.size))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    return (cpu_s(pid) - start_cpu) / sent * 1e6


if __name__ == "__main__":
    sys.exit(main())
