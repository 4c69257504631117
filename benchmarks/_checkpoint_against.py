"""benchmarks/checkpoint.py --against TREE: our own saves and loads in two versions, each in processes of its own, in turns.

Run as a program it measures the version that it imports, once: `_checkpoint_against.py SIZE_MB FOLDER`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

LOADS = 5
#: (version, what) -> seconds of every process
Times = dict[tuple[str, str], list[float]]


def compare(against: Path, sizes: list[int], rounds: int, folder: str) -> dict[str, dict[str, float]]:
    """size -> medians of this version ("…_s"), of the other one ("…_before_s") and their ratio, smaller is better."""
    trees = {"before": against, "now": Path(__file__).resolve().parent.parent}
    found = {}
    for size in sizes:
        times: Times = {}
        for number in range(rounds):
            for version in ("before", "now") if number % 2 == 0 else ("now", "before"):
                for what, seconds in _measure_in(trees[version], size, folder).items():
                    times.setdefault((version, what), []).append(seconds)
        medians = {key: statistics.median(values) for key, values in times.items()}
        found[f"{size}mb"] = {
            name: value
            for what in dict.fromkeys(what for _, what in medians)
            for name, value in (
                (f"{what}_before_s", medians["before", what]),
                (f"{what}_s", medians["now", what]),
                (f"{what}_ratio", medians["now", what] / medians["before", what]),
            )
        }
    return found


def _measure_in(tree: Path, size_mb: int, folder: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="allranks-against-", dir=folder) as own:
        done = subprocess.run(
            [sys.executable, __file__, str(size_mb), own],
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(size_mb: int, folder: Path) -> dict[str, float]:
    """Medians of a few saves and loads of this process's version."""
    import torch

    from _checkpoint_floors import drop_cache
    from _checkpoint_job import Job, build, timed
    from _checkpoint_ours import to_disk

    torch.set_num_threads(1)
    job = Job(size_mb)
    method, manager = to_disk(job, folder)
    times: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        times.setdefault(what, []).append(seconds)

    for number in range(1, 4):  # the first one allocates
        began = time.perf_counter()
        copied, durable = method.start(folder, number)
        stall = time.perf_counter() - began
        copied()
        durable()
        if number > 1:
            note("stall", stall)
            note("save", time.perf_counter() - began)
    drop_cache(folder)
    note("load_cold", timed(lambda: manager.restore(job.model, job.optimizer)))
    for _ in range(LOADS):
        note("load_warm", timed(lambda: manager.restore(job.model, job.optimizer)))
    for _ in range(2):
        note("restart_warm", timed(partial(manager.restore, *build(size_mb))))
    method.close()
    return {what: statistics.median(values) for what, values in times.items()}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]))))
