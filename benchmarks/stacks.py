"""What a look costs: time, CPU and pause of each tool, as a ratio to plain `py-spy dump` in the same run.

    python benchmarks/stacks.py [--quick] [--json]

Targets are forked processes with 30 threads each that wait. The pause is the time a target's main thread was
seen in a tracing stop, sampled as fast as one core can.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from allranks.model.stacks import Capture
from allranks.stacktraces import CollectOptions, classify, collect, read_capture, targets_of, write_bundle
from allranks.stacktraces.debuggers import find_pyspy
from allranks.stacktraces.text import grow_tree

THREADS = 30


@contextmanager
def targets(count: int) -> Iterator[dict[int, int]]:
    """Forked processes that wait with many threads; rank -> pid."""
    pids, pipes = {}, []
    for rank in range(count):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            for _ in range(THREADS - 1):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            os.write(write_end, b"x")
            while True:
                time.sleep(1000)
        pids[rank] = pid
        pipes.append((read_end, write_end))
    for read_end, write_end in pipes:
        os.read(read_end, 1)
        os.close(read_end)
        os.close(write_end)
    try:
        yield pids
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


class PauseSampler:
    """Samples whether a process is in a tracing stop; runs in a process of its own so that it costs us no GIL."""

    CODE = (
        "import sys,time,select\n"
        "path='/proc/%s/stat'%sys.argv[1]; stopped=0.0; last=time.perf_counter(); print('ready',flush=True)\n"
        "while not select.select([sys.stdin],[],[],0)[0]:\n"
        "    state=open(path).read().rsplit(')',1)[1].split()[0]; now=time.perf_counter()\n"
        "    stopped+=(now-last) if state in 'tT' else 0.0; last=now\n"
        "print(stopped,flush=True)\n"
    )

    def __init__(self, pid: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self) -> float:
        """Seconds in a tracing stop since the start."""
        out, _ = self.process.communicate("\n", timeout=30)
        return float(out.strip())


def measure(work: Callable[[], object], pid: int, repeats: int) -> dict[str, float]:
    """Median wall, CPU and pause of some work on a process."""
    walls, cpus, pauses = [], [], []
    for _ in range(repeats):
        before, begin = cpu_s(), time.perf_counter()
        work()
        walls.append(time.perf_counter() - begin)
        cpus.append(cpu_s() - before)
    for _ in range(max(2, repeats // 3)):
        sampler = PauseSampler(pid)
        work()
        pauses.append(sampler.stop())
    return {
        "wall_ms": 1e3 * statistics.median(walls),
        "cpu_ms": 1e3 * statistics.median(cpus),
        "pause_ms": 1e3 * statistics.median(pauses),
    }


def run(*words: str) -> None:
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def tools_table(repeats: int) -> dict[str, dict[str, float]]:
    """Each tool on one process."""
    spy = find_pyspy() or "py-spy"
    with targets(1) as pids:
        pid = pids[0]
        chosen = targets_of(pids)
        first = CollectOptions(rounds=1, interval_s=0, native="never")
        return {
            "py-spy dump": measure(lambda: run(spy, "dump", "--pid", str(pid)), pid, repeats),
            "py-spy --nonblocking": measure(lambda: run(spy, "dump", "--nonblocking", "--pid", str(pid)), pid, repeats),
            "py-spy --native": measure(lambda: run(spy, "dump", "--native", "--pid", str(pid)), pid, max(3, repeats // 2)),
            "allranks, one round": measure(lambda: collect(chosen, first), pid, repeats),
        }  # fmt: skip


def node_numbers(repeats: int) -> dict[str, float]:
    """Eight local ranks, two rounds without the pause between them: CPU of everything, ours and the tools'."""
    with targets(8) as pids:
        options = CollectOptions(rounds=2, interval_s=0.0, native="never")
        found = [_collect_cpu(pids, options) for _ in range(repeats)]
        both = [_plain_cpu(pids) for _ in range(repeats)]
    return {
        "node_two_rounds_cpu_s": statistics.median(found),
        "node_two_plain_dumps_cpu_s": statistics.median(both),
    }


def _collect_cpu(pids: dict[int, int], options: CollectOptions) -> float:
    before = cpu_s()
    collect(targets_of(pids), options)
    return cpu_s() - before


def _plain_cpu(pids: dict[int, int]) -> float:
    before = cpu_s()
    for _ in range(2):
        for pid in pids.values():
            run(find_pyspy() or "py-spy", "dump", "--pid", str(pid))
    return cpu_s() - before


def merge_numbers(count: int) -> dict[str, float]:
    """Classifying and merging a job of many ranks with 30 threads each, and its bundle on disk."""
    import tempfile
    from dataclasses import replace

    with targets(1) as pids:
        one = collect(targets_of(pids), CollectOptions(rounds=2, interval_s=0.0, native="never")).processes[0]
    capture = Capture(tuple(replace(one, rank=rank) for rank in range(count)))
    numbers = {}
    for name, work in (("classify", lambda: classify(capture)), ("tree", lambda: grow_tree(capture, True))):
        before = time.process_time()
        work()
        numbers[f"{name}_{count}_ranks_cpu_s"] = time.process_time() - before
    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        path = write_bundle(capture, Path(folder))
        read_capture(folder)
        numbers[f"bundle_{count}_ranks_cpu_s"] = time.process_time() - before
        numbers[f"bundle_{count}_ranks_mb"] = path.stat().st_size / 1e6
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats; ends within a minute")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    if find_pyspy() is None:
        print("py-spy is not installed: pip install 'allranks[stacks]'", file=sys.stderr)
        return 2
    table = tools_table(5 if args.quick else 15)
    base = table["py-spy dump"]
    numbers = node_numbers(1 if args.quick else 5) | merge_numbers(1024)
    ratios = {}
    print(f"{'tool':24s} {'wall ms':>9s} {'CPU ms':>9s} {'pause ms':>9s}   ratio to py-spy dump (wall, CPU)")
    for name, row in table.items():
        ratios[f"{name} wall"] = row["wall_ms"] / base["wall_ms"]
        ratios[f"{name} cpu"] = row["cpu_ms"] / base["cpu_ms"]
        ratios[f"{name} pause"] = row["pause_ms"] / max(base["pause_ms"], 1e-3)
        numbers |= {f"{name} {unit}": value for unit, value in row.items()}
        print(
            f"{name:24s} {row['wall_ms']:9.1f} {row['cpu_ms']:9.1f} {row['pause_ms']:9.2f}   {ratios[f'{name} wall']:.2f}, {ratios[f'{name} cpu']:.2f}"
        )
    ratios["node two rounds cpu"] = numbers["node_two_rounds_cpu_s"] / numbers["node_two_plain_dumps_cpu_s"]
    for name in sorted(key for key in numbers if key.endswith(("_s", "_mb"))):
        print(f"{name:36s} {numbers[name]:9.2f}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        print(json.dumps({"name": "stacks", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
