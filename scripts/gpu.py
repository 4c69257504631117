"""Every check that needs a GPU, on one GPU or many: one table, one JSON file. See gpu.sh.

    gpu.py [--list] [--only CHECK,CHECK] [--out FOLDER]

Each check is a script of this folder that prints PASS or FAIL per claim and writes OUT/gpu_CHECK.json with
{"verdicts": {claim: bool}, "numbers": ...}. Results of earlier slices in the same folder are kept: run the checks in as many
slices as the machine's time limit asks for, then `gpu.py --table` prints all of them and writes gpu.json, from which
scripts/docs.py makes the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# check -> seconds that gpu_CHECK.py takes at most
CHECKS = {
    "record": 180,
    "stacks": 250,
    "checkpoint": 200,
    "manager": 290,
    "plain": 400,
    "joins": 560,
    "shapes": 580,
    "first_contact": 580,
}


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    import torch

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def run_check(name: str, out: Path, more: list[str]) -> None:
    """Runs one script; what it printed is kept beside its numbers."""
    command = [sys.executable, str(HERE / f"gpu_{name}.py"), str(out), *more]
    path = out / f"gpu_{name}.json"
    if name != "first_contact":  # its parts may be run in slices of their own
        path.unlink(missing_ok=True)
    began = time.monotonic()
    print(f"== {name}", flush=True)
    verdicts: dict[str, bool] = {}
    with subprocess.Popen(
        ["timeout", str(CHECKS[name]), *command],
        env={**os.environ, "OUT": str(out)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("PASS", "FAIL")):
                verdicts[line[4:].split("  {")[0].strip()] = line.startswith("PASS")
    code = process.returncode
    numbers = json.loads(path.read_text()) if path.exists() else {}
    found: dict[str, Any] = {"verdicts": verdicts, "numbers": numbers.get("numbers", numbers)}
    if code and all(found["verdicts"].values()):
        found["verdicts"][f"the script ends well (code {code})"] = False
    found |= {"seconds": round(time.monotonic() - began, 1), "machine": machine()}
    path.write_text(json.dumps(found, indent=1))


def table(out: Path) -> int:
    """Prints all results of the folder and writes gpu.json."""
    results = {}
    for name in CHECKS:
        path = out / f"gpu_{name}.json"
        if not path.exists():
            print(f"{'–':6}{name:16}not run")
            continue
        results[name] = found = json.loads(path.read_text())
        for claim, holds in found["verdicts"].items():
            print(f"{'PASS' if holds else 'FAIL':6}{name:16}{claim[:160]}")
    (out / "gpu.json").write_text(json.dumps(results, indent=1))
    failed = sum(not holds for found in results.values() for holds in found["verdicts"].values())
    print(f"{len(results)} of {len(CHECKS)} checks run, {failed} claims failed; wrote {out / 'gpu.json'}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Every check that needs a GPU.")
    parser.add_argument("--list", action="store_true", help="the checks and how long they take at most")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks to run, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--table", action="store_true", help="only print what earlier slices found")
    args, more = parser.parse_known_args()
    if args.list:
        for name, limit_s in CHECKS.items():
            print(f"{name:16}{limit_s:5} s  gpu_{name}.py")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name in () if args.table else args.only.split(","):
        if name not in CHECKS:
            parser.error(f"no check {name!r}: one of {', '.join(CHECKS)}")
        run_check(name, args.out.resolve(), more)
    return table(args.out)


if __name__ == "__main__":
    sys.exit(main())
