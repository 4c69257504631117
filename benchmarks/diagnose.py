"""`allranks diagnose` beside `torchfrtrace` and beside the floor of unpickling, on dumps of an imagined job.

    python benchmarks/diagnose.py [--quick] [--json] [--ranks 8 64 256 1024] [--boxes 16384] [--short-rings 100000]

CPU seconds and peak memory are those of whole processes, start-up included; the floor is the bare loop of
pickle.load with the collector off. Every verdict is checked against the planted fault. We run as installed packages
do, torchfrtrace included: with byte code, which a checkout under PYTHONDONTWRITEBYTECODE has not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_dumps import Job, make_job, write_boxes, write_pickles

ALLRANKS = [sys.executable, "-m", "allranks"]
FLOOR = """
import gc, os, pickle, sys, time
gc.disable()
files = [os.path.join(sys.argv[1], name) for name in os.listdir(sys.argv[1])]
began = time.process_time()
for name in files:
    with open(name, "rb") as file:
        pickle.load(file)
print(time.process_time() - began)
"""


@dataclass(frozen=True)
class Run:
    """What one process cost."""

    cpu_s: float
    wall_s: float
    peak_mb: float
    out: str
    err: str
    code: int

    def numbers(self) -> dict[str, float]:
        return {
            "cpu_s": round(self.cpu_s, 3),
            "wall_s": round(self.wall_s, 3),
            "peak_mb": round(self.peak_mb, 1),
        }


def measure(command: list[str], env: dict[str, str] | None = None) -> Run:
    """Runs a command to its end and reads its costs from the kernel."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Run(
        usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024, texts[0], texts[1], process.returncode
    )


def best(command: list[str], times: int, env: dict[str, str]) -> Run:
    """The cheapest of several runs: noise only adds."""
    return min((measure(command, env) for _ in range(times)), key=lambda run: run.cpu_s)


def installed(folder: Path) -> dict[str, str]:
    """An environment in which byte code is kept, in a folder of our own; the first run fills it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(folder / "pycache")
    return env


def diagnose(folder: Path, job: Job, env: dict[str, str], times: int = 1) -> Run:
    """Our verdict on a folder; stops the benchmark when it is wrong."""
    run = best([*ALLRANKS, "diagnose", str(folder), "--json"], times, env)
    if run.code != 1:
        raise SystemExit(f"diagnose exited {run.code} on {folder}: {run.err[-500:]}")
    verdict = json.loads(run.out)["verdict"]
    if verdict["ranks"] != [job.guilty] or verdict["cause"] not in (
        "missing_rank",
        "stuck_before_collective",
    ):
        raise SystemExit(f"wrong verdict on {folder}: {verdict['sentence']}; rank {job.guilty} is guilty")
    return run


def floor_s(folder: Path, times: int) -> float:
    """CPU seconds of unpickling every file, without start-up."""
    return min(float(measure([sys.executable, "-c", FLOOR, str(folder)]).out) for _ in range(times))


def peer() -> str | None:
    """Where torchfrtrace is installed, if it is."""
    beside = Path(sys.executable).parent / "torchfrtrace"
    return str(beside) if beside.exists() else shutil.which("torchfrtrace")


def bench_world(world: int, with_peer: bool, folder: Path, times: int, say: Any) -> dict[str, Any]:
    """All measurements at one number of ranks."""
    job, env = make_job(world), installed(folder)
    pickles, boxes = folder / f"pickles{world}", folder / f"boxes{world}"
    size = write_pickles(job, pickles)
    write_boxes(job, boxes)
    found: dict[str, Any] = {"pickle_bytes": size, "entries": job.entries}
    found["floor_cpu_s"] = round(floor_s(pickles, times), 3)
    found["pickles"] = diagnose(pickles, job, env, times).numbers()
    found["boxes"] = diagnose(boxes, job, env, times).numbers()
    script = peer()
    if with_peer and script:
        run = measure([script, str(pickles)])
        found["torchfrtrace"] = run.numbers() | {"findings": run.err.count("Not all ranks joining")}
    say(f"{world:6d} ranks: {found}")
    shutil.rmtree(pickles)
    shutil.rmtree(boxes)
    return found


def ratios_of(worlds: dict[int, dict[str, Any]]) -> dict[str, float]:
    """The ratios that the goals speak of; larger is better except for `vs_floor`."""
    ratios: dict[str, float] = {}
    for world, found in worlds.items():
        ours, boxes = found["pickles"], found["boxes"]
        ratios[f"pickles_cpu_vs_floor_{world}"] = round(ours["cpu_s"] / found["floor_cpu_s"], 2)
        other = found.get("torchfrtrace")
        if other:
            ratios[f"pickles_cpu_vs_torchfrtrace_{world}"] = round(other["cpu_s"] / ours["cpu_s"], 1)
            ratios[f"pickles_memory_vs_torchfrtrace_{world}"] = round(other["peak_mb"] / ours["peak_mb"], 1)
            ratios[f"boxes_cpu_vs_torchfrtrace_{world}"] = round(other["cpu_s"] / boxes["cpu_s"], 1)
    sizes = sorted(worlds)
    if len(sizes) > 2:
        per_rank = [worlds[n]["pickles"]["cpu_s"] / n for n in (sizes[-2], sizes[-1])]
        ratios["growth_per_rank"] = round(per_rank[1] / per_rank[0], 2)
    return ratios


def bench_boxes(count: int, folder: Path, say: Any, entries: int = 2000) -> dict[str, Any]:
    """A verdict on very many black boxes, of so many calls each."""
    job = make_job(count, entries)
    boxes = folder / f"boxes{count}"
    size = write_boxes(job, boxes)
    run = diagnose(boxes, job, installed(folder))
    shutil.rmtree(boxes)
    say(f"{count:6d} boxes: {run.numbers()} of {size} bytes")
    return {"ranks": count, "bytes": size, **run.numbers()}


def bench_startup(folder: Path) -> Run:
    """What a verdict on eight small files costs: hardly more than starting."""
    job = make_job(8, entries=50)
    write_boxes(job, folder / "small")
    return diagnose(folder / "small", job, installed(folder), 5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="within a minute: up to 256 ranks, the peer up to 64"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default 8 64 256 1024)")
    parser.add_argument("--boxes", type=int, help="black boxes in the large run (default 16384; quick 1024)")
    parser.add_argument(
        "--short-rings",
        type=int,
        default=0,
        metavar="N",
        help="also N black boxes of 64 calls (about 2 GB on disk)",
    )
    args = parser.parse_args()
    worlds = args.ranks or ([8, 64, 256] if args.quick else [8, 64, 256, 1024])
    peer_limit = 64 if args.quick else max(worlds)

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    if peer() is None:
        say("torchfrtrace is not installed: no comparison with it")
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        folder = Path(name)
        bench_startup(folder)  # fills the byte code
        found = {
            world: bench_world(world, world <= peer_limit, folder, 1 if world > 256 else 2, say)
            for world in worlds
        }
        many = bench_boxes(args.boxes or (1024 if args.quick else 16384), folder, say)
        short = bench_boxes(args.short_rings, folder, say, 64) if args.short_rings else None
        startup = bench_startup(folder)
    say(f"start-up: {startup.numbers()}")
    report = {
        "name": "diagnose",
        "ratios": ratios_of(found),
        "numbers": {"ranks": found, "many_boxes": many, "short_rings": short, "startup": startup.numbers()},
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }
    print(json.dumps(report) if args.json else json.dumps(report["ratios"], indent=1))


if __name__ == "__main__":
    main()
