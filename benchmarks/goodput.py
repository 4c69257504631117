"""The ledger against what was planted: real jobs of both modes with kills, hangs, slow ranks, saves, evaluation, restarts.

    benchmarks/goodput.py [--only NAME…] [--rounds 1] [--json FILE]

Each drill prints, for every row that has a planted value, planted and booked rank-seconds. A row is right within 5 % or 0.5 s
for each rank; all rows must add up to the wall clock within 0.5 %. Also: the agent's time for one look at a rank, and the time to
read a month of 1,000 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).parent / "_goodput_job.py"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Drill:
    """`expected`: rank-seconds by state that follow from the arguments; the rest is what ranks print as planted."""

    name: str
    launch: tuple[str, ...]
    script: tuple[str, ...]
    ranks: int
    expected: dict[str, float] = field(default_factory=dict)
    runs: int = 1


def whole(
    name: str,
    *script: str,
    ranks: int = 2,
    expected: dict[str, float] | None = None,
    runs: int = 1,
    flags: tuple[str, ...] = (),
) -> Drill:
    launch = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3", *flags)
    return Drill(f"whole job: {name}", launch, script, ranks, expected or {}, runs)


def replica(name: str, *script: str, ranks: int = 3, expected: dict[str, float] | None = None) -> Drill:
    return Drill(f"replicas: {name}", ("--replicas", str(ranks)), script, ranks, expected or {})


def drills() -> list[Drill]:
    plain = ("--steps", "60", "--step-s", "0.1")
    saved = (*plain, "--save-every", "10", "--save-s", "0.3", "--state", "{folder}/state")
    return [
        whole("nothing", *plain, expected={"waiting": 0.0, "stalled": 0.0, "repeated": 0.0, "useful": 2 * 59 * 0.1}),
        whole("first step", *plain, "--first-s", "3", expected={"compiling": 2 * 3.1, "useful": 2 * 59 * 0.1}),
        whole("slow start", *plain, "--start-s", "4"),
        whole("slow rank", *plain, "--slow-rank", "1", "--slow-s", "0.1", expected={"waiting": 59 * 0.1}),
        whole("slow rank of three", *plain, "--slow-rank", "2", "--slow-s", "0.05", ranks=3, expected={"waiting": 2 * 59 * 0.05}),
        whole("saves", *saved),
        whole("evaluation", *plain, "--eval-at", "30", "--eval-s", "4"),
        whole("kill and restore", *saved, "--kill-at", "36", expected={"repeated": 2 * 5 * 0.1}),
        whole("kill late", *saved, "--kill-at", "58", "--kill-rank", "1", expected={"repeated": 2 * 7 * 0.1}),
        whole("hang that ends", *plain, "--hang-at", "40", "--hang-s", "15", flags=("--notice-s", "4"), expected={"stalled": 2 * 15.0}),
        whole("requeue", *saved, expected={"repeated": 0.0}, runs=2),
        replica("nothing", *plain, expected={"repeated": 0.0}),
        replica("slow rank", *plain, "--slow-rank", "1", "--slow-s", "0.1", expected={"waiting": 2 * 59 * 0.1}),
        replica("saves", *plain, "--save-every", "10", "--save-s", "0.3"),
        replica("kill", "--steps", "150", "--step-s", "0.1", "--kill-at", "20", "--kill-rank", "2", expected={"repeated": 0.0}),
        replica("kill with evaluation", "--steps", "150", "--step-s", "0.1", "--kill-at", "20", "--eval-at", "100", "--eval-s", "3"),
    ]  # fmt: skip


def run(drill: Drill, folder: Path) -> tuple[dict[str, float], dict[str, object]]:
    """(planted, the account) of one drill."""
    environment = {**os.environ, "ALLRANKS_DIR": str(folder / "boxes"), "ALLRANKS_HISTORY": "off"}
    script = [word.replace("{folder}", str(folder)) for word in drill.script]
    planted: dict[str, float] = defaultdict(float, drill.expected)
    command = [sys.executable, "-m", "allranks"]
    for _ in range(drill.runs):
        words = [*command, "run", "--job", "drill", *drill.launch, str(SCRIPT), *script]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{drill.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        for line in done.stdout.splitlines():
            if "PLANTED" in line:
                _, state, seconds, _ = line.split("PLANTED ")[1].split()
                planted[state] += float(seconds) if state in ("saving", "evaluation") else 0.0
    read = subprocess.run(
        [*command, "goodput", "allranks-incidents", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(read.stdout)
    if "--slow-rank" in script:
        slow = subprocess.run(
            [*command, "slow", str(folder / "boxes"), "--json"], capture_output=True, text=True
        )
        found["what_if"] = json.loads(slow.stdout) if slow.returncode == 1 else {}
    return {state: s for state, s in planted.items() if state not in ("kill", "hang")}, found


def judge(drill: Drill, planted: dict[str, float], found: dict[str, object]) -> dict[str, object]:
    booked = found["rank_seconds"]
    assert isinstance(booked, dict)
    wall = float(str(found["running_s"])) * drill.ranks
    off = abs(sum(booked.values()) / wall - 1)
    rows = {}
    for state, seconds in sorted(planted.items()):
        error = abs(booked[state] - seconds)
        right = error <= max(0.05 * seconds, 0.5 * drill.ranks)
        rows[state] = {"planted": round(seconds, 3), "booked": round(booked[state], 3), "right": right}
        print(
            f"  {'ok ' if right else 'BAD'} {state:<11} planted {seconds:8.2f} s  booked {booked[state]:8.2f} s",
            flush=True,
        )
    if what_if := found.get("what_if"):
        assert isinstance(what_if, dict)
        own = float(drill.script[drill.script.index("--step-s") + 1])
        best = what_if["what_ifs"][0]
        error = best["step_s"] / own - 1
        print(f"  what if     {what_if['sentence']} (the step itself sleeps {own} s: {error:+.1%})")
        rows["what_if"] = {
            "who": best["who"],
            "step_s": best["step_s"],
            "error": error,
            "right": abs(error) <= 0.1,
        }
    print(f"  {'ok ' if off <= 0.005 else 'BAD'} sum         off by {off:.3%}", flush=True)
    return {"rows": rows, "sum_off": round(off, 6), "goodput": found["goodput"]}


def agent_cost() -> dict[str, float]:
    """Seconds of the agent for one look at one rank, with eight ranks that train."""
    sys.path.insert(0, str(ROOT / "tests"))
    from allranks.ledger.agent import LedgerKeeper
    from goodput.timelines import T0, PaperRank

    ranks = [PaperRank(n) for n in range(8)]
    for rank in ranks:
        rank.start(0.0)
        rank.steps(1.0, 0, 1200, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        keeper = LedgerKeeper(Path(folder), "cost", "n", "whole_job")
        keeper.start(T0)
        looks = [[s for rank in ranks if (s := rank.at(turn / 2)) is not None] for turn in range(1200)]
        begin = time.process_time()
        for turn, samples in enumerate(looks):
            keeper.observe(samples, range(8), T0 + turn / 2)
        used = time.process_time() - begin
    return {"look_us": used / 1200 / 8 * 1e6, "share_of_a_core_per_rank": used / 600 / 8}


def month_cost() -> dict[str, float]:
    sys.path.insert(0, str(ROOT / "tests"))
    from allranks.ledger.file import find_ledgers, ledger_path, line_of, read_ledger
    from allranks.ledger.summary import account
    from goodput.test_ledger_file import month

    with tempfile.TemporaryDirectory() as folder:
        for name, records in month(1000, 8, 30):
            ledger_path(Path(folder), "month", name).write_bytes(b"".join(line_of(one) for one in records))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        begin, cpu = time.perf_counter(), time.process_time()
        account([read_ledger(path) for path in find_ledgers(Path(folder))])
        return {"bytes": size, "read_s": time.perf_counter() - begin, "read_cpu_s": time.process_time() - cpu}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numbers: dict[str, object] = {"agent": agent_cost(), "month_of_1000_ranks": month_cost()}
    print(json.dumps(numbers))
    wrong = 0
    for drill in drills() * args.rounds:
        if args.only and not any(word in drill.name for word in args.only):
            continue
        print(drill.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(drill, *run(drill, Path(folder)))
        numbers[drill.name] = verdict
        rows = verdict["rows"]
        assert isinstance(rows, dict)
        wrong += sum(not row["right"] for row in rows.values()) + (float(str(verdict["sum_off"])) > 0.005)
    print(f"{wrong} rows are wrong")
    if args.json is not None:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        body = {
            "command": "benchmarks/goodput.py",
            "version": "0.3.0",
            "date": day,
            "name": "goodput",
            "numbers": numbers,
        }
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        args.json.write_text(json.dumps({**body, "machine": machine}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
