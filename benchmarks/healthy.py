"""An hour of healthy jobs: pauses, evaluations, compiles, checkpoints, garbage, busy neighbours. No alarm, nobody evicted.

    benchmarks/healthy.py [--minutes 8] [--jobs 7] [--busy N] [--out results.jsonl]

Jobs run side by side at default flags, in turn a whole job with marks, one without, and three replicas; --busy loops keep
cores occupied beside them. Promise: no incident at all but "slow", none with an action, every job ends with code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from allranks.incidents.folder import read_incidents

JOB = Path(__file__).with_name("_healthy_job.py")
ALARMS = ("hang", "death", "partition")


def run_job(number: int, seconds: float, folder: Path, results: Path) -> dict[str, Any]:
    """One job to its end, and what it was accused of; kept at once."""
    out = folder / str(number)
    out.mkdir()
    replicas = number % 3 == 2
    mode = ["--replicas", "3"] if replicas else ["--standalone", "--nproc-per-node", "3"]
    command = [
        *(sys.executable, "-m", "allranks", "run", *mode, "--quiet", "--recovery", "on"),
        *("--job", f"healthy-{os.getpid()}-{number}", "--incidents", str(out / "incidents")),
        *(str(JOB), str(out), str(seconds), str(number)),
    ]
    path = os.pathsep.join(filter(None, (str(JOB.parents[1] / "src"), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    with open(out / "log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            code = job.wait(seconds * 4 + 300)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait(60)
            code = 124
    stories = read_incidents(out / "incidents")
    alarms = [story for story in stories if story["kind"] in ALARMS]
    row: dict[str, Any] = {
        "number": number,
        "mode": "replica" if replicas else "whole, marks" if number % 2 else "whole, no marks",
        "seconds": round(time.monotonic() - began, 1),
        "exit": code,
        "alarms": [[s["kind"], (s["verdict"] or {}).get("sentence") or s["reason"]] for s in alarms],
        "actions": sum(bool((s.get("action") or {}).get("done")) for s in stories),
        "slow": sum(story["kind"] == "slow" for story in stories),
    }
    if code or alarms:
        row["log"] = (out / "log").read_text(errors="replace")[-3000:]
    with open(results, "a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def main() -> int:
    """Prints the sum; exit 1 when a healthy job was accused or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of each job")
    parser.add_argument("--jobs", type=int, default=7, help="side by side")
    parser.add_argument("--busy", type=int, default=4, help="processes that only keep cores busy")
    parser.add_argument("--out", type=Path, default=Path("healthy.jsonl"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="allranks-healthy-"))
    loop = [sys.executable, "-c", "while True: sum(range(10000))"]
    busy = [subprocess.Popen(loop) for _ in range(args.busy)]
    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(lambda n: run_job(n, 60 * args.minutes, folder, args.out), range(args.jobs)))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for row in rows:
        print({key: value for key, value in row.items() if key != "log"})
    minutes = sum(row["seconds"] for row in rows) / 60
    alarms, actions = sum(len(row["alarms"]) for row in rows), sum(row["actions"] for row in rows)
    failed = sum(row["exit"] != 0 for row in rows)
    print(f"{minutes:.1f} minutes of healthy jobs: {alarms} alarms, {actions} actions, {failed} jobs failed")
    return 1 if alarms or actions or failed else 0


if __name__ == "__main__":
    sys.exit(main())
