"""Unmodified training programs under `allranks run` at default flags: how long from the hang to the verdict.

    benchmarks/unmodified.py [--only trainer,fsdp2,…] [--hang-at 40] [--jobs N] [--json]

Hugging Face Trainer, Lightning, Accelerate, plain DDP, FSDP2, a pipeline and ZeRO, with the real packages (those that are not
installed are left out and named). Rank 1 of 3 sleeps in its data code; `callback` is a Trainer in which a callback of rank 1
alone calls a barrier. Promise: the verdict names that rank and the user's
line at most 25 s after the hang.
"""

from __future__ import annotations

import argparse
import importlib.util
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

JOBS = Path(__file__).with_name("_unmodified_jobs.py")
PACKAGES = {
    "trainer": "transformers",
    "callback": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
NAMES = ("trainer", "callback", "lightning", "accelerate", "ddp", "fsdp2", "pipeline", "zero")
PROMISE_S, LIMIT_S, HUNG_RANK = 25.0, 300.0, 1


def measure(name: str, hang_at: int) -> dict[str, Any]:
    """One job, until its hang has a verdict."""
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        return {"name": name, "missing": package}
    folder = Path(tempfile.mkdtemp(prefix=f"allranks-unmodified-{name}-"))
    command = [
        *(sys.executable, "-m", "allranks", "run", "--standalone", "--nproc-per-node", "3", "--quiet"),
        *("--job", folder.name, "--incidents", str(folder / "incidents")),
        *(str(JOBS), name, str(folder), str(hang_at)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), "HF_HUB_OFFLINE": "1"}
    with open(folder / "log", "w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            story = _wait(job, folder)
        finally:
            job.terminate()
            job.wait(60)
    if story is None:
        return {"name": name, "verdict_s": None, "log": (folder / "log").read_text()[-2000:]}
    hung = float((folder / "hung").read_text())
    at = {moment["name"]: moment["at"] for moment in story["timeline"]}
    verdict = story["verdict"] or {}
    return {
        "name": name,
        "noticed_s": round(at["noticed"] - hung, 1),
        "verdict_s": round(at["verdict"] - hung, 1),
        "right_rank": verdict.get("ranks") == [HUNG_RANK],
        "right_line": ("on_step_end" if name == "callback" else "load_batch") in str(verdict.get("where")),
        "cause": verdict.get("cause"),
        "where": verdict.get("where"),
    }


def _wait(job: subprocess.Popen[bytes], folder: Path) -> dict[str, Any] | None:
    """The incident with the verdict; None when there is none in time."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        for story in read_incidents(folder / "incidents"):
            if story["kind"] == "hang" and any(m["name"] == "verdict" for m in story["timeline"]):
                return story
        time.sleep(0.2)
    return None


def _path() -> str:
    return os.pathsep.join(filter(None, (str(JOBS.parents[1] / "src"), os.environ.get("PYTHONPATH"))))


def main() -> int:
    """Prints a table; exit 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--hang-at", type=int, default=40, help="step of the hang")
    parser.add_argument("--jobs", type=int, default=1, help="side by side")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not args.json:
        print("| program | noticed | verdict | rank | line | cause |\n|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda name: measure(name, args.hang_at), args.only.split(",")):
            rows.append(row)
            print(json.dumps(row) if args.json else _line(row), flush=True)
    measured = [row for row in rows if "missing" not in row]
    return 0 if all((row["verdict_s"] or 1e9) <= PROMISE_S and row["right_rank"] for row in measured) else 1


def _line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"| {row['name']} | {row['missing']} is not installed | | | | |"
    if row["verdict_s"] is None:
        return f"| {row['name']} | **not noticed** | | | | |"
    right = {True: "right", False: "**wrong**"}
    return (
        f"| {row['name']} | {row['noticed_s']} s | {row['verdict_s']} s | {right[row['right_rank']]} | "
        f"{right[row['right_line']]} ({row['where']}) | {row['cause']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
