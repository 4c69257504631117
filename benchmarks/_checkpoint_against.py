"""benchmarks/checkpoint.py --against TREE: our own saves and loads in two versions, each in processes of its own, alternating.

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
from collections.abc import Callable
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
                measured = _measure_in(trees[version], size, folder)
                print(size, version, json.dumps(measured), file=sys.stderr, flush=True)
                for what, seconds in measured.items():
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
    from _checkpoint_job import Job, build
    from _checkpoint_ours import to_disk

    torch.set_num_threads(1)
    job = Job(size_mb)
    method, manager = to_disk(job, folder)
    times: dict[str, list[float]] = {}

    def measured(what: str, act: Callable[[], object]) -> None:
        """Seconds by the clock, and of CPU with the helper's: on a busy machine only these can be compared."""
        clock, cpu = time.perf_counter(), _cpu_s(manager.saves.helper.pid)
        act()
        times.setdefault(what, []).append(time.perf_counter() - clock)
        times.setdefault(f"{what}_cpu", []).append(_cpu_s(manager.saves.helper.pid) - cpu)

    def save(step: int) -> None:
        copied, durable = method.start(folder, step)
        copied()
        durable()

    save(1)  # allocates, starts the helper
    for step in (2, 3):
        measured("save", partial(save, step))
    for what in ("load_first", "load_cold", "load_cold"):  # the first one of a process loads modules, too
        drop_cache(folder)
        measured(what, lambda: manager.restore(job.model, job.optimizer))
    for _ in range(LOADS):
        measured("load_warm", lambda: manager.restore(job.model, job.optimizer))
    for _ in range(3):
        measured("restart_warm", partial(manager.restore, *build(size_mb)))
    method.close()
    return {what: statistics.median(values) for what, values in times.items()}


def _cpu_s(helper: int) -> float:
    spent = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), Path(sys.argv[2]))))
