"""Heartbeats, pushes, quorums, kills, rejoins and steps of this version and of another one, alternating, with the ratio of the medians.

    benchmarks/against.py TREE [--rounds 4] [--json]

TREE is a source tree of the other version; each round runs `lighthouse.py` and `recovery.py` of either tree, on this machine
and with this interpreter. A quiet machine tells more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
#: One round, in the tree that is the current folder: its own benchmarks and its own package.
LIGHTHOUSE = """
import glob, json, statistics, sys
sys.path.insert(0, "benchmarks")
import lighthouse as bench
def cpu_s(pid):
    return sum(int(open(f).read().split()[0]) for f in glob.glob(f"/proc/{pid}/task/*/schedstat")) / 1e9
bench.cpu_s = cpu_s
bench.raise_open_files()
with bench.lighthouse("--min-replicas", "1000", "--heartbeat-timeout-ms", "30000") as (address, pid):
    crowd = bench.Crowd(address, 1000)
    crowd.join_all(0)
    found = {"heartbeat_cpu_us": bench.paced(crowd, pid, 5.0), **bench.push(crowd, pid, 8)}
    found["quorum_1000_s"] = statistics.median(crowd.join_all(1000 + number) for number in range(4))
    crowd.close()
print(json.dumps(found))
"""
RECOVERY = """
import json, os, statistics, sys, tempfile
from pathlib import Path
sys.path.insert(0, "benchmarks")
import recovery as bench
from _recovery_replicas import Library
with tempfile.TemporaryDirectory() as folder:
    plain, ours = libraries = [Library(name, sys.executable, Path(folder)) for name in ("plain", "allranks")]
    for library in libraries:
        library.open()
    for library in libraries:
        library.wait_ready()
    times, crashes = bench.kill(ours, 8)
    cost = bench.step_cost(libraries, 300, 1)
    found = {"kill_s": statistics.median(times), "kill_worst_s": max(times), "survivor_crashes": crashes}
    found |= {f"step_{name}_ms": value for name, value in cost.items()}
    rejoin = bench.heal([ours], bench.HEAVY, 2)["allranks"]
    found |= {f"rejoin_{name}": rejoin[name] for name in ("healed_s", "first_common_step_s", "longest_stall_s")}
    for library in libraries:
        library.close()
print(json.dumps(found))
"""


def one_round(tree: Path, script: str) -> dict[str, float]:
    """The numbers of one tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "ALLRANKS_TOKEN": "of-this-benchmark-alone"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        sides = [("before", args.tree.resolve()), ("now", HERE)]
        for side, tree in sides if number % 2 == 0 else sides[::-1]:
            for script in (LIGHTHOUSE, RECOVERY):
                for name, value in one_round(tree, script).items():
                    found.setdefault(name, {"before": [], "now": []})[side].append(value)
    medians = {
        name: {side: statistics.median(values) for side, values in sides.items()}
        for name, sides in found.items()
    }
    if args.json:
        print(json.dumps({"name": "against", "numbers": medians, "runs": found}))
        return 0
    for name, sides in medians.items():
        ratio = sides["now"] / sides["before"] if sides["before"] else float("nan")
        print(f"{name:<28}{sides['before']:>10.4g}{sides['now']:>10.4g}{ratio:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
