"""`allranks stacks` on jobs that know nothing of us: every script of examples/hangs without a recorder, as torchrun starts it.

    benchmarks/stacks_gallery.py [--jobs N] [--output FILE] [NAME ...]

A job that hangs must be STUCK with a line of the script, a healthy one MOVING (or over), each within 8 s. `rank` counts those
that name the ranks of the table in examples/hangs/README.md; where all ranks wait in calls, stacks alone cannot. Jobs that end
before the look are left out. Prints one JSON line per job, then the counts.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "hangs"))

import gallery

from allranks.drill.ranks import Ranks

SETTLE_S, START_S = 3.0, 20.0


def _rank(rank: int, world: int, script: str) -> None:
    """A rank of torchrun: it records nothing."""
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    runpy.run_path(script, run_name="__main__")


def look(case: gallery.Truth) -> dict[str, Any]:
    """One job, and what the command says of it."""
    row: dict[str, Any] = {"name": case.name, "healthy": not case.causes}
    with Ranks(_rank, case.processes, args=(str(case.script),), backend=None) as ranks:
        deadline, busy = time.monotonic() + START_S, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - busy < SETTLE_S:
            if any(gallery._is_running(pid) for pid in ranks.pids.values()):
                busy = time.monotonic()
            time.sleep(0.05)
        if all(gallery._state(pid) == "Z" for pid in ranks.pids.values()):
            return row | {"state": "over"}
        pids = [word for pid in ranks.pids.values() for word in ("--pid", str(pid))]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "allranks", "stacks", *pids, "--json"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        row["seconds"] = round(time.monotonic() - began, 1)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        return row | {"state": "", "error": (done.stdout + done.stderr)[-300:]}
    named = tuple(said["culprits"])
    row |= {"state": said["state"], "sentence": said["sentence"], "ranks": named, "wanted": case.ranks}
    return row | {"rank": named == case.ranks, "line": f"{case.script.name}:" in said["sentence"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    gallery.preload()
    table = gallery.truth()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(look, [table[name] for name in args.names or table]):
            rows.append(row)
            print(json.dumps(row), flush=True)
    still = [row for row in rows if not row["healthy"] and row["state"] != "over"]
    numbers = {
        "hangs": len(still),
        "stuck": sum(row["state"] == "stuck" for row in still),
        "rank": sum(row.get("rank", False) for row in still),
        "line": sum(row.get("line", False) for row in still),
        "healthy": sum(row["healthy"] for row in rows),
        "healthy_stuck": sum(row["healthy"] and row["state"] == "stuck" for row in rows),
        "slowest_s": max((row.get("seconds", 0.0) for row in rows), default=0.0),
    }
    print(json.dumps(numbers))
    if args.output:
        args.output.write_text(
            json.dumps({"command": "benchmarks/stacks_gallery.py", "numbers": numbers}, indent=1) + "\n"
        )
    return int(numbers["healthy_stuck"] > 0)


if __name__ == "__main__":
    sys.exit(main())
