"""What it costs to look at the processes of a job: wall and CPU seconds of one look, its pauses left out.

    python benchmarks/process_tree.py [--processes 200] [--rest SECONDS]

Starts a tree of Python processes that wait in four ways (socket, queue, lock, sleep), looks at it, and prints one JSON line.
CPU seconds are ours and those of py-spy. With --rest a second line: what `allranks watch --tree` uses of one core between its
looks, while nothing moves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

from allranks.diagnosis.process_verdict import explain_processes
from allranks.stacktraces.tree import LookOptions, find_tree, look_at_processes

#: So long without a clock tick, and the watch has begun; its first look is after 30 s.
SETTLE_S, SETTLE_LIMIT_S = 2.0, 20.0


def wait(number: int, queue: multiprocessing.Queue, ready: multiprocessing.Semaphore) -> None:  # type: ignore[type-arg]
    ours, _theirs = socket.socketpair()
    held = threading.Lock()
    held.acquire()
    ready.release()
    ways = (lambda: ours.recv(1), queue.get, held.acquire, lambda: time.sleep(3600))
    ways[number % len(ways)]()


def serve(count: int) -> None:
    """The first process of the tree."""
    context = multiprocessing.get_context("fork")
    queue, ready = context.Queue(), context.Semaphore(0)
    for number in range(count - 1):
        context.Process(target=wait, args=(number, queue, ready), daemon=True).start()
    for _ in range(count - 1):
        ready.acquire()
    print("ready", flush=True)
    time.sleep(3600)


def cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def at_rest(first: int, seconds: float) -> float:
    """Percent of one core that watching uses, after its start."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "allranks",
            "watch",
            "--pid",
            str(first),
            "--tree",
            "--wait",
            "0",
            "-o",
            folder,
        ]
        watch = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            settle(watch.pid)
            began, used = time.monotonic(), _ticks(watch.pid)
            time.sleep(seconds)
            return 100 * (_ticks(watch.pid) - used) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
        finally:
            watch.terminate()
            watch.wait()


def settle(pid: int) -> None:
    """Until a process has imported what it needs."""
    until, used, since = time.monotonic() + SETTLE_LIMIT_S, 0, time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < SETTLE_S:
        time.sleep(0.1)
        if (now := _ticks(pid)) > used + 1:
            used, since = now, time.monotonic()


def _ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rsplit(")", 1)[1].split()[11:15]))  # its children's, too


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument(
        "--rest", type=float, default=0.0, metavar="SECONDS", help="watch so long, at most 20"
    )
    args = parser.parse_args()
    count = args.processes
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        os.dup2(write, 1)
        serve(count)
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            lines.readline()
        began, used = time.monotonic(), cpu_s()
        look = look_at_processes(find_tree([first]), LookOptions(for_s=0.0, rounds=2))
        finding = explain_processes(look)
        row = {"processes": len(look.processes), "wall_s": time.monotonic() - began, "cpu_s": cpu_s() - used}
        print(json.dumps({**{k: round(v, 2) for k, v in row.items()}, "state": finding.state}))
        if args.rest:
            print(json.dumps({"watching_percent_of_a_core": round(at_rest(first, args.rest), 2)}))
    finally:
        os.killpg(first, 9)
        os.waitpid(first, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
