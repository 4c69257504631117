"""The drill matrix of the closed loop: each fault in a random rank and step of a real job in replicas.

Prints how often the right rank and the right cause were named, how long notice and recovery took, what was a
false alarm, what a healthy job under CPU stress was accused of, and what the whole system costs a training step:
the same script under torchrun and under `allranks run` (recording, watch, lighthouse; in replicas also the Manager),
in short runs that take turns, compared pair by pair.

    benchmarks/loop.py [--quick] [--json] [--rounds N] [--kinds hang,kill,…] [--whole kill,…] [--together]
        [--healthy-s S] [--overhead-rounds N] [--against TREE]
    benchmarks/loop.py --matrix [--kinds hang,kill,…] [--points 0,60,heal,…] [--modes whole,replica] [--device cuda]
        [--jobs N] [--minutes M] [--slice K/M] [--exec] [--out results.jsonl]    every kind of fault at every point,
        one job each; what the file has already is not run again
    benchmarks/loop.py --summary results.jsonl                the tables and promises of results gathered before
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from _loop_matrix import POINTS, list_cells, run_matrix, summarise
from allranks.drill import demo_train
from allranks.drill.plan import make_plan
from allranks.drill.run import DrillResult, FaultResult, run_drill
from allranks.drill.self_faults import FAULTS

RATIOS = ("step_time_whole", "step_time_replicas", "around_whole", "around_replicas")
SCRIPT = Path(__file__).with_name("_loop_script.py")
REPLICAS = 3
WIDTH = 1024  # of the model whose step is measured: some 40 ms on a slow core
QUICK = ("kill",)
FULL = (
    "kill",
    "exit",
    "segfault",
    "raise",
    "hang",
    "stop",
    "busy",
    "lock",
    "gil",
    "loader",
    "subprocess",
    "queue",
    "fifo",
    "file_lock",
    "network",
    "store",
    "partition",
)
WHOLE = ("kill", "raise", "hang", "recv", "extra")  # also in a plain DDP job, which restarts as a whole
HARMLESS = ("slow", "pause")


def drill(kinds: list[str], seed: int, folder: Path, *, notice_s: float, pace_s: float) -> DrillResult:
    """One job with one fault after the other, far enough apart for each replica to come back."""
    dice = random.Random(seed)
    faults: list[dict[str, Any]] = []
    step = 0
    for kind in kinds:
        step += dice.randint(25, 40)
        for_s = {"slow": 0.5, "pause": 5.0}.get(kind, 0.0)
        faults.append({"kind": kind, "rank": dice.randrange(REPLICAS), "at_step": step, "for_s": for_s})
        step += int(15 / pace_s)  # a replica needs seconds to start again
    plan = make_plan({"seed": seed, "faults": faults}, ranks=REPLICAS)
    out = folder / "out"
    out.mkdir(parents=True)
    command = [
        "allranks", "run", "--replicas", str(REPLICAS), "--notice-s", str(notice_s), "--job", f"loop-{os.getpid()}-{seed}",
        demo_train.__file__, "--steps", str(step + 20), "--pace-s", str(pace_s), "--out", str(out),
    ]  # fmt: skip
    return run_drill(plan, command, folder / "drill", timeout_s=600, quiet=True)


def drill_whole(kind: str, seed: int, folder: Path, *, notice_s: float) -> DrillResult:
    """The same in whole-job mode: plain DDP, all ranks start again."""
    dice = random.Random(seed)
    fault = {"kind": kind, "rank": dice.randrange(REPLICAS), "at_step": dice.randint(25, 40)}
    plan = make_plan({"seed": seed, "faults": [fault]}, ranks=REPLICAS)
    command = [
        "allranks", "run", "--standalone", "--nproc-per-node", str(REPLICAS), "--max-restarts", "2", "--recovery", "on",
        "--notice-s", str(notice_s), "--job", f"whole-{os.getpid()}-{seed}", str(SCRIPT), str(folder / "out"), "60", "64",
    ]  # fmt: skip
    return run_drill(plan, command, folder / "drill", timeout_s=300, quiet=True)


def healthy(seconds: float, folder: Path, notice_s: float) -> DrillResult:
    """A job without faults while every core is kept busy."""
    pace = 0.1
    stress = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    out = folder / "out"
    out.mkdir(parents=True)
    command = [
        "allranks", "run", "--replicas", str(REPLICAS), "--notice-s", str(notice_s), "--job", f"healthy-{os.getpid()}",
        demo_train.__file__, "--steps", str(int(seconds / pace)), "--pace-s", str(pace), "--out", str(out),
    ]  # fmt: skip
    try:
        return run_drill(
            make_plan({"faults": []}), command, folder / "drill", timeout_s=seconds * 10 + 300, quiet=True
        )
    finally:
        for process in stress:
            process.kill()
            process.wait()


def overhead(rounds: int, steps: int, folder: Path, against: Path | None = None) -> dict[str, float]:
    """What training costs under us against torchrun: medians over pairs of runs.

    `against` is the source tree of another version, which takes its turns too.

    step_time: the fastest tenth of the steps, which nothing else disturbed. around: CPU of the ranks and all around
    them (agent, lighthouse, helpers) for each CPU second of the ranks; it does not depend on other load.
    """
    ours = [sys.executable, "-m", "allranks", "run", "--quiet", "--incidents", str(folder / "incidents")]
    commands = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "whole": [*ours, "--standalone", "--nproc-per-node", "2"],
        "replicas": [*ours, "--replicas", "2", "--min-replicas", "2"],
    }
    sources = dict.fromkeys(commands, SCRIPT.parents[1])
    if against is not None:
        for name in ("whole", "replicas"):
            commands[f"{name}_before"], sources[f"{name}_before"] = commands[name], against
    folder.mkdir(parents=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for round_ in range(rounds):
        names = list(commands) if round_ % 2 == 0 else list(commands)[::-1]
        for name in names:
            out = folder / f"{name}.{round_}.json"
            tree = sources[name].absolute()
            script = tree / "benchmarks" / SCRIPT.name
            words = [*commands[name], str(script), str(out), str(steps), str(WIDTH)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "src")}
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
            found[name].append(run := json.loads(out.read_text()))
            share = 100 * run["around_cpu"] / run["ranks_cpu"]
            print(
                f"{name}: {share:.2f} % around the ranks, step {fast(run):.4f} s", file=sys.stderr, flush=True
            )
    base = found.pop("torchrun")
    numbers = {
        "step_ms": 1000 * statistics.median(fast(run) for run in base),
        "around_cpu_ms_per_s_torchrun": 1000 * statistics.median(run["around_cpu"] for run in base),
    }
    for name, runs in found.items():
        pairs = list(zip(runs, base, strict=True))
        numbers[f"step_time_{name}"] = statistics.median(fast(a) / fast(b) for a, b in pairs)
        numbers[f"around_{name}"] = 1 + statistics.median(
            (a["around_cpu"] - b["around_cpu"]) / a["ranks_cpu"] for a, b in pairs
        )
        numbers[f"around_cpu_ms_per_s_{name}"] = 1000 * statistics.median(run["around_cpu"] for run in runs)
    return numbers


def fast(run: dict[str, Any]) -> float:
    """Seconds of a step that nothing disturbed: the fastest tenth."""
    steps = sorted(run["step_s"])
    return float(statistics.mean(steps[: max(1, len(steps) // 10)]))


def summary(results: list[DrillResult], calm: DrillResult | None, cost: dict[str, float]) -> dict[str, Any]:
    """Ratios and numbers over all drills."""
    faults = [fault for result in results for fault in result.faults]
    fired = [fault for fault in faults if fault.fired]
    judged = [fault for fault in fired if FAULTS[fault.kind].causes]
    ranks = [fault for fault in judged if fault.verdict and fault.verdict.get("ranks") == [fault.rank]]
    causes = [fault for fault in judged if fault.verdict_right]
    deaths = [
        f.noticed_s
        for f in judged
        if f.kind in ("kill", "exit", "segfault", "raise") and f.noticed_s is not None
    ]
    hangs = [
        f.noticed_s
        for f in judged
        if f.kind not in ("kill", "exit", "segfault", "raise") and f.noticed_s is not None
    ]
    recovered = [f.recovered_s for f in judged if f.recovered_s is not None]
    numbers: dict[str, Any] = {
        "faults": len(faults),
        "fired": len(fired),
        "death_noticed_s_median": statistics.median(deaths) if deaths else None,
        "death_noticed_s_max": max(deaths, default=None),
        "hang_noticed_s_median": statistics.median(hangs) if hangs else None,
        "hang_noticed_s_max": max(hangs, default=None),
        "recovered_share": len(recovered) / len(judged) if judged else None,
        "false_alarms": sum(r.false_alarms for r in results) + (calm.false_alarms if calm else 0),
        "false_evictions": sum(r.false_evictions for r in results) + (calm.false_evictions if calm else 0),
        "identical_replicas": all(r.identical_replicas is not False for r in results),
        "jobs_finished": sum(r.exit_code == 0 for r in results),
        "jobs": len(results),
    }
    if calm:
        numbers["healthy_exit_code"] = calm.exit_code
    ratios = {name: value for name, value in cost.items() if name in RATIOS}
    numbers |= {name: value for name, value in cost.items() if name not in ratios}
    if judged:
        ratios |= {"right_rank": len(ranks) / len(judged), "right_cause": len(causes) / len(judged)}
    numbers["kinds"] = by_kind(judged)
    return {
        "name": "loop", "ratios": ratios, "numbers": numbers,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
    }  # fmt: skip


def by_kind(judged: list[FaultResult]) -> dict[str, dict[str, Any]]:
    """Kind -> samples, how many named the right rank and cause, and the notice and recovery times."""
    found: dict[str, dict[str, Any]] = {}
    for fault in judged:
        row = found.setdefault(
            fault.kind, {"samples": 0, "right_rank": 0, "right_cause": 0, "noticed_s": [], "recovered_s": []}
        )
        named = (fault.verdict or {}).get("ranks")
        row["samples"] += 1
        row["right_rank"] += named == [fault.rank] or (fault.kind == "partition" and named == [])
        row["right_cause"] += bool(fault.verdict_right)
        row["noticed_s"] += [] if fault.noticed_s is None else [round(fault.noticed_s, 3)]
        row["recovered_s"] += [] if fault.recovered_s is None else [round(fault.recovered_s, 2)]
    return found


def main() -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one job with one kill")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, help="times through the matrix")
    parser.add_argument(
        "--first-round", type=int, default=0, help="another number draws other ranks and steps"
    )
    parser.add_argument(
        "--together", action="store_true", help="all kinds of a round in one job, one after the other"
    )
    parser.add_argument("--kinds", default="", help="only these, separated by commas; none: no drill")
    parser.add_argument(
        "--whole", default=",".join(WHOLE), help="kinds in whole-job mode, separated by commas"
    )
    parser.add_argument(
        "--healthy-s", type=float, default=120.0, help="length of the healthy run under stress; 0: none"
    )
    parser.add_argument(
        "--overhead-rounds", type=int, default=6, help="pairs of runs that measure what a step costs; 0: none"
    )
    parser.add_argument(
        "--against", type=Path, help="source tree of another version whose cost is measured in the same run"
    )
    parser.add_argument("--overhead-steps", type=int, default=300, help="of one such run")
    parser.add_argument("--notice-s", type=float, default=5.0, help="least silence that is looked at")
    parser.add_argument("--matrix", action="store_true", help="kinds x points, one job each, as tables")
    parser.add_argument("--points", default=",".join(POINTS), help="of the matrix, separated by commas")
    parser.add_argument("--modes", default="whole,replica", help="of the matrix, separated by commas")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the matrix")
    parser.add_argument("--jobs", type=int, default=1, help="cells of the matrix side by side")
    parser.add_argument("--slice", default="1/1", metavar="K/M", help="only every Mth cell, beginning with K")
    parser.add_argument("--minutes", type=float, default=0.0, help="no cell is begun after these; 0: all")
    parser.add_argument("--exec", action="store_true", help="start every process anew instead of by fork")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"), help="one JSON line per cell")
    parser.add_argument("--summary", type=Path, help="only sum up what an earlier --out holds")
    args = parser.parse_args()
    if args.summary:
        summarise(args.summary)
        return 0
    kinds = (
        [kind for kind in args.kinds.split(",") if kind != "none"]
        if args.kinds
        else list(QUICK if args.quick else (*FULL, *HARMLESS))
    )
    folder = Path(tempfile.mkdtemp(prefix="allranks-loop-"))
    if args.matrix:
        part, parts = (int(number) for number in args.slice.split("/"))
        chosen = [kind for kind in args.kinds.split(",") if kind]
        cells = list_cells(chosen, args.points.split(","), args.modes.split(","), args.device)
        chosen_cells = cells[part - 1 :: parts]
        run_matrix(chosen_cells, args.jobs, args.out, args.notice_s, minutes=args.minutes, fork=not args.exec)
        summarise(args.out)
        return 0
    results = []
    for round_ in range(args.first_round, args.first_round + args.rounds):
        batches = [kinds] if args.quick or args.together else [[kind] for kind in kinds]
        for number, batch in enumerate(batches):
            result = drill(
                batch,
                seed(batch, round_),
                folder / f"{round_}-{number}",
                notice_s=args.notice_s,
                pace_s=0.1,
            )
            results.append(result)
            show(result)
        for number, kind in enumerate([kind for kind in args.whole.split(",") if kind and not args.quick]):
            place = folder / f"whole-{round_}-{number}"
            results.append(drill_whole(kind, seed([kind], round_), place, notice_s=args.notice_s))
            show(results[-1])
    began = time.monotonic()
    calm = (
        healthy(args.healthy_s, folder / "healthy", args.notice_s)
        if args.healthy_s and not args.quick
        else None
    )
    calm_s = time.monotonic() - began
    cost = {}
    if args.overhead_rounds:
        cost = overhead(
            1 if args.quick else args.overhead_rounds,
            60 if args.quick else args.overhead_steps,
            folder / "overhead",
            args.against,
        )
    found = summary(results, calm, cost)
    if calm:
        found["numbers"]["healthy_s"] = round(calm_s, 1)
    if args.json:
        print(json.dumps(found))
    else:
        for kind, row in found["numbers"].pop("kinds").items():
            print(f"{kind:>26}  {row}")
        for name, value in {**found["ratios"], **found["numbers"]}.items():
            print(f"{name:>26}  {value}")
    return 0


def seed(kinds: list[str], round_: int) -> int:
    """The same for the same kinds and round, whatever else is run."""
    return zlib.crc32(",".join(kinds).encode()) % 10_000 + round_


def show(result: DrillResult) -> None:
    """One line per fault, as it goes."""
    for fault in result.faults:
        cause = (fault.verdict or {}).get("cause")
        print(
            f"{fault.kind:>10} rank {fault.rank} step {fault.step}: fired {fault.fired}, noticed {_s(fault.noticed_s)}, "
            f"right {fault.verdict_right} ({cause}), training went on after {_s(fault.recovered_s)}, "
            f"false alarms {result.false_alarms}, evictions {result.false_evictions}, exit {result.exit_code}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _s(value: float | None) -> str:
    return "never" if value is None else f"{value:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
