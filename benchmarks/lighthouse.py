"""The lighthouse against torchft's Rust lighthouse, in one run on one machine.

    python benchmarks/lighthouse.py [--quick] [--json] [--soak SECONDS]

Measured: server CPU per paced heartbeat at 1,000 connections; quorum latency; push of a failure notice to
1,000 connections; memory per 1,000 connections; kill -9, SIGSTOP and a line gone silent until every survivor
has the notice. With --soak, 10,000 replicas are held under load and false deaths counted. Clients and server
share the machine, for both sides alike; CPU times are the server's only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _lighthouse_crowd import LOST, Crowd
from _lighthouse_torchft import GrpcCrowd, find_server, start
from allranks.lighthouse.limits import raise_open_files
from allranks.testing.ranks import free_port

_TICK = os.sysconf("SC_CLK_TCK")
_VICTIM = """
import sys, time
from allranks.lighthouse.client import Client, ClientOptions
from allranks.model.cluster import Member
client = Client(ClientOptions(addresses=(sys.argv[1],), replica="victim", beacon=sys.argv[2] == "beacon")).start(60)
ticket = client.request_quorum(Member("victim"))
print("asked", flush=True)
ticket.result(60)
print("member", flush=True)
time.sleep(600)
"""


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
    """Ours over theirs; below 1 is better."""
    found = {}
    for name, value in numbers.items():
        other = numbers.get(f"torchft_{name}")
        if isinstance(value, float) and isinstance(other, float) and other > 0:
            found[name] = round(value / other, 4)
    return found


# ---- measuring a server -------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def rss_mb(pid: int) -> float:
    """Resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def lighthouse(*words: str) -> Iterator[tuple[str, int]]:
    """(address, pid) of a lighthouse started by its command."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", "lighthouse", "--json", "--no-token", "--bind", "127.0.0.1:0",
             "--log-level", "warning", *words],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"], process.pid
        finally:
            process.terminate()
            process.wait(20)


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
        numbers.update(push(crowd, 10 if quick else 30))
        say("pushes done")
        crowd.close()
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
    rounds = 4 if quick else 15
    for kind in ("thread", "beacon"):
        numbers[f"kill_to_all_survivors_ms_{kind}"] = round(
            1000 * statistics.median(killed(signal.SIGKILL, 30.0, kind) for _ in range(rounds)), 2
        )
    numbers["kill_s"] = numbers["kill_to_all_survivors_ms_thread"] / 1000
    numbers["sigstop_s"] = round(
        statistics.median(killed(signal.SIGSTOP, 1.0, "beacon") for _ in range(2)), 3
    )
    numbers["silent_line_s"] = round(gone_silent(1.0), 3)
    numbers["sigstop_and_silence_limit_s"] = 1.2  # heartbeat timeout 1 s + one beat of 0.2 s
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


def push(crowd: Crowd, rounds: int) -> dict[str, Any]:
    """One member closes its line; milliseconds until the 990th and the last of 999 others has the notice."""
    p99, last = [], []
    for step in range(rounds):
        victim = next(iter(crowd.lights.values()))
        name, times = victim.name, []
        began = time.perf_counter()
        crowd.drop(victim)
        crowd.wait(LOST, set(crowd.lights), 30.0, lambda fd: times.append(time.perf_counter() - began))  # noqa: B023
        times.sort()
        p99.append(1000 * times[int(len(times) * 0.99) - 1])
        last.append(1000 * times[-1])
        crowd.connect(name)
        crowd.join_all(step + 1)
    return {
        "push_1000_p99_ms": round(statistics.median(p99), 2),
        "push_1000_last_ms": round(statistics.median(last), 2),
    }


def killed(number: int, timeout_s: float, kind: str, survivors: int = 20) -> float:
    """Seconds from the signal to a real replica process until every survivor has the notice."""
    words = ("--min-replicas", str(survivors + 1), "--heartbeat-timeout-ms", str(int(timeout_s * 1000)))
    with lighthouse(*words) as (address, _):
        victim = subprocess.Popen(
            [sys.executable, "-c", _VICTIM, address, kind],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        crowd = None
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "asked\n"
            crowd = Crowd(address, survivors, beat_s=0.1)
            crowd.join_all(0)
            assert victim.stdout.readline() == "member\n"
            pids = [victim.pid]
            if number == signal.SIGSTOP:  # the whole machine freezes: its beacon too
                pids += children(victim.pid)
            keep_beating(crowd, 0.3)
            began = time.perf_counter()
            for pid in pids:
                os.kill(pid, number)
            return wait_lost(crowd, began, timeout_s)
        finally:
            for pid in [*children(victim.pid), victim.pid]:
                try:
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            victim.wait(20)
            if crowd is not None:
                crowd.close()


def gone_silent(timeout_s: float) -> float:
    """Seconds until every survivor has the notice after one line carries nothing any more, not even a close."""
    words = ("--min-replicas", "20", "--heartbeat-timeout-ms", str(int(timeout_s * 1000)))
    with lighthouse(*words) as (address, _):
        crowd = Crowd(address, 20, beat_s=0.1)
        try:
            crowd.join_all(0)
            keep_beating(crowd, 0.3)
            silent = crowd.lights.pop(next(iter(crowd.lights)))
            crowd._poll.unregister(silent.sock.fileno())
            spent = wait_lost(crowd, time.perf_counter(), timeout_s)
            silent.sock.close()
            return spent
        finally:
            crowd.close()


def keep_beating(crowd: Crowd, seconds: float) -> None:
    """A job in peace."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        crowd.beat_if_due()
        crowd.pump(0.02)


def wait_lost(crowd: Crowd, began: float, timeout_s: float) -> float:
    """Seconds until each has a notice of loss."""
    crowd.wait(LOST, set(crowd.lights), timeout_s * 3 + 20)
    return time.perf_counter() - began


def children(pid: int) -> list[int]:
    """Direct children, of all threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(each) for each in task.read_text().split()]
        except OSError:
            continue
    return found


def soak(seconds: float, size: int) -> dict[str, Any]:
    """Holds `size` replicas that beat once a second while two busy processes take the CPU; counts false deaths."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        with lighthouse("--min-replicas", str(size), "--heartbeat-timeout-ms", "5000") as (address, pid):
            crowd = Crowd(address, size, beat_s=1.0)
            lights, began, start_cpu, sent = list(crowd.lights.values()), time.perf_counter(), cpu_s(pid), 0
            lost = 0
            while (now := time.perf_counter() - began) < seconds:
                due = int(now * size)
                while sent < due:
                    light = lights[sent % size]
                    if light.sock.fileno() >= 0:
                        crowd.beat(light, sent)
                    sent += 1
                lost += len(crowd.pump(0.001, LOST))
            used = cpu_s(pid) - start_cpu
            result = {
                "soak_replicas": size, "soak_s": seconds, "soak_heartbeats": sent,
                "soak_false_deaths": len(crowd.closed) + lost, "soak_server_cpu_share": round(used / seconds, 3),
                "soak_server_rss_mb": round(rss_mb(pid), 1),
            }  # fmt: skip
            crowd.close()
            return result
    finally:
        for process in busy:
            process.kill()
            process.wait(10)


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
        numbers["torchft_kill_s"] = round(
            await crowd.one_quorum(0, 1), 3
        )  # the other never asks again: it is dead
        await crowd.close()
    return numbers


class torchft:
    """A torchft lighthouse that answers."""

    def __init__(self, script: Path, min_replicas: int) -> None:
        self._script, self._min, self._port = script, min_replicas, free_port()

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
