"""Runs benchmarks and keeps the object that each prints last, with version and date, in benchmarks/results/NAME.json.

    python scripts/measure.py startup job_page 'recovery --only allranks'

The numbers in README.md come from these files (scripts/docs.py writes them there).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def measure(line: str) -> int:
    """Runs one benchmark; returns its exit code."""
    from allranks import __version__

    name, *flags = shlex.split(line)
    load = round(os.getloadavg()[0], 1)  # what else the machine did before
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *flags, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        print(f"{name} printed no JSON object", file=sys.stderr)
        return done.returncode or 1
    date = time.strftime("%Y-%m-%d", time.gmtime())
    kept = {
        "command": " ".join([f"benchmarks/{name}.py", *flags]),
        "version": __version__,
        "date": date,
        "load": load,
        **found,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(max([measure(line) for line in sys.argv[1:]], default=2))
