"""How long the command takes to start, and what a terminal library would add. Promises: `allranks --help` at most 0.1 s,
`import allranks` at most 30 ms beyond the interpreter, neither with torch or numpy.

    python benchmarks/startup.py [--quick] [--json] [--rounds 20]

The ratios are CPU to that of a bare `python -c pass` in the same rounds. We run as an installed package does: with byte code, which
a checkout under PYTHONDONTWRITEBYTECODE has not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAMS = {
    "python": ["-c", "pass"],
    "import_allranks": ["-c", "import allranks"],
    "help": ["-m", "allranks", "--help"],
    "diagnose_help": ["-m", "allranks", "diagnose", "--help"],
    "run_help": ["-m", "allranks", "run", "--help"],
    "import_rich": ["-c", "import rich.console, rich.table, rich.live, rich.progress"],
}


def seconds(words: list[str]) -> tuple[float, float]:
    """(elapsed, CPU) of one run; the second does not depend on what else the machine does."""
    begin, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, cpu


def main() -> int:
    """Prints times and ratios; exit code 1 when a promise is broken, judged by CPU, which is all that an idle machine adds."""
    parser = argparse.ArgumentParser(description="start-up times")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="7 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    args.rounds = 7 if args.quick else args.rounds
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        for words in PROGRAMS.values():  # fills it
            subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    """All rounds."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):  # alternately, so that a busy moment hits all alike
        for name, words in PROGRAMS.items():
            try:
                times.setdefault(name, []).append(seconds(words))
            except subprocess.CalledProcessError:
                times.pop(name, None)
    found = {
        name: {
            "median_s": round(statistics.median(elapsed for elapsed, _ in runs), 4),
            "best_s": round(min(runs)[0], 4),
            "cpu_s": round(statistics.mean(cpu for _, cpu in runs), 4),
        }
        for name, runs in times.items()
    }
    bare = found["python"]
    found["import_beyond_python"] = {key: round(found["import_allranks"][key] - bare[key], 4) for key in bare}
    if "import_rich" in found:
        found["rich_beyond_python"] = {key: round(found["import_rich"][key] - bare[key], 4) for key in bare}
    for name, values in found.items():
        print(
            f"{name:<22} median {values['median_s'] * 1000:7.1f} ms   best {values['best_s'] * 1000:7.1f} ms"
            f"   CPU {values['cpu_s'] * 1000:6.1f} ms"
        )
    ratios = {
        f"{name}_vs_python": round(values["cpu_s"] / bare["cpu_s"], 2)
        for name, values in found.items()
        if name != "python" and not name.endswith("beyond_python")
    }
    for name, ratio in ratios.items():
        print(f"{name:<26} {ratio:.2f} x")
    if args.json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"name": "startup", "ratios": ratios, "numbers": found, "machine": machine}))
    return int(found["help"]["cpu_s"] > 0.1 or found["import_beyond_python"]["cpu_s"] > 0.03)


if __name__ == "__main__":
    sys.exit(main())
