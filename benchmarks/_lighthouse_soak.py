"""Ten thousand replicas held for minutes on a loaded machine, with as many unknown clients at the door; counts false deaths."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _lighthouse_crowd import LOST, WELCOME, Crowd
from _lighthouse_server import cpu_s, lighthouse, rss_mb


def soak(seconds: float, size: int) -> dict[str, Any]:
    """`size` replicas beat once a second; a busy process per core and `size` half-open unknown clients do their worst."""
    with (
        busy(),
        lighthouse("--min-replicas", str(size), "--heartbeat-timeout-ms", "5000") as (address, pid),
    ):
        crowd = Crowd(address, size, beat_s=1.0)
        before, numbers = cpu_s(pid), {}
        try:
            with unknown_clients(address, size, numbers):
                numbers |= hold(crowd, address, seconds)
            numbers["soak_server_cpu_share"] = round((cpu_s(pid) - before) / seconds, 3)
            numbers["soak_server_rss_mb"] = round(rss_mb(pid), 1)
            return numbers | final_word(address)
        finally:
            crowd.close()


def hold(crowd: Crowd, address: str, seconds: float) -> dict[str, Any]:
    """Everybody beats, evenly spread; once a second an honest newcomer says hello and is timed."""
    lights, size = list(crowd.lights.values()), len(crowd.lights)
    began, sent, lost, last = time.perf_counter(), 0, 0, 0
    with guests(address) as waits:
        while (now := time.perf_counter() - began) < seconds:
            due = int(now * size)
            last = max(last, due - size)  # who was late beats once, not for each beat it missed
            for index in range(last, min(due, last + 500)):  # between two looks at what came in
                light = lights[index % size]
                if light.sock.fileno() >= 0:
                    crowd.beat(light, index)
                    sent += 1
                last = index + 1
            lost += len(crowd.pump(0.001, LOST))
    return {
        "soak_replicas": size, "soak_s": seconds, "soak_heartbeats": sent,
        "soak_false_deaths": max(len(crowd.closed), lost),
        "soak_hello_ms": round(1000 * statistics.median(waits), 1), "soak_hello_max_ms": round(1000 * max(waits), 1),
    }  # fmt: skip


@contextmanager
def guests(address: str) -> Iterator[list[float]]:
    """Once a second a newcomer says hello; seconds until each was welcome."""
    waits: list[float] = []
    over = threading.Event()

    def visit() -> None:
        while not over.wait(1.0):
            waits.append(_visit(address))

    thread = threading.Thread(target=visit, name="guests", daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join(60)


def _visit(address: str) -> float:
    """Seconds until a newcomer is welcome."""
    began = time.perf_counter()
    guest = Crowd(address, 0)
    guest.wait(WELCOME, {guest.connect("guest").sock.fileno()}, 30.0)
    spent = time.perf_counter() - began
    guest.close()
    return spent


def final_word(address: str) -> dict[str, Any]:
    """What the lighthouse itself says: who is there, and whether it ever lost one of the crowd."""
    with urllib.request.urlopen(f"http://{address}/api/status", timeout=60) as answer:
        status = json.load(answer)
    losses = [e for e in status["history"] if e["kind"] == "lost" and e["replica"] != "guest"]
    return {
        "soak_still_there": sum(row["replica"] != "guest" for row in status["replicas"]),
        "soak_losses_told": len(losses),
    }


@contextmanager
def busy() -> Iterator[None]:
    """A process per core that never rests."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait(10)


@contextmanager
def unknown_clients(address: str, count: int, numbers: dict[str, Any]) -> Iterator[None]:
    """`count` half-open connections, half of them slow-loris; how they fared is noted in the end."""
    script = Path(__file__).with_name("_lighthouse_unknown_clients.py")
    process = subprocess.Popen(
        [sys.executable, str(script), address, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        yield
    finally:
        said, _ = process.communicate(timeout=60)
        numbers |= {f"soak_unknown_clients_{name}": value for name, value in json.loads(said).items()}
