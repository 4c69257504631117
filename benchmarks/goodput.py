"""The ledger, what-if, fail-slow and the simulator against real jobs with planted faults.

    benchmarks/goodput.py costs     CPU of ranks and of the agent, ledger on and off; reading a month of 1,000 ranks
    benchmarks/goodput.py drills    30 drilled jobs of both modes: planted against booked rank-seconds
    benchmarks/goodput.py what-if   20 programs: predicted step without the delay against the measured one, and the cause
    benchmarks/goodput.py fail-slow 40 programs in which a rank becomes a tenth slower: named within 60 steps
    benchmarks/goodput.py healthy   programs with noise, evaluation, saves and changing inputs: no alarm
    benchmarks/goodput.py replicas  simulated against real goodput of 3 to 16 replicas, three fault plans

    [--jobs 2] [--limit 540] [--output DIR] [--only WORD…] [--seed 7000] [--runs N] [--steps N]

Jobs are CPU tensors over gloo whose computing is a sleep, forked from this process, which has torch loaded: dozens run at
once on two cores. Every case is one JSON line in DIR; failed ones leave their logs, ledgers and black boxes there. A case of
what-if takes about 100 s, one of replicas 105 s (and 105 s before the first one), so on 16 cores:

    benchmarks/goodput.py what-if --jobs 10 --limit 400
    benchmarks/goodput.py replicas --jobs 4 --limit 580
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before numpy is imported: its threads do not survive a fork
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import _goodput_costs as costs  # noqa: E402
import _goodput_drills as drills  # noqa: E402
import _goodput_measured as measured  # noqa: E402
import forks  # noqa: E402
from _series import Result, Series  # noqa: E402

SIZES = (3, 4, 8, 16)


def month_cost() -> dict[str, float]:
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


def cases_of(args: argparse.Namespace, series: Series) -> dict[str, Callable[[Path], Result]]:
    if args.series == "drills":
        return drills.cases(series)
    if args.series == "what-if":
        return measured.what_if_cases(series, args.seed, args.steps or 60)
    if args.series == "fail-slow":
        return measured.fail_slow_cases(series, args.seed, args.runs or 40)
    if args.series == "healthy":
        return measured.healthy_cases(series, args.seed, args.runs or args.jobs)
    with tempfile.TemporaryDirectory() as folder:
        known = measured.calibrate(series, Path(folder))
    print(json.dumps({"calibrated": known}), flush=True)
    return measured.replica_cases(series, args.seed, SIZES, known)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("costs", "drills", "what-if", "fail-slow", "healthy", "replicas")
    parser.add_argument("series", choices=names)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=Path("goodput-series"))
    for name, default in (("jobs", 2), ("seed", 7000), ("runs", 0), ("steps", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=540.0)
    args = parser.parse_args()
    if args.series == "costs":
        with tempfile.TemporaryDirectory() as folder:
            stretches = int(args.limit / costs.STRETCH_S) - 4
            print(json.dumps(costs.measure(Path(folder), 4, stretches)), flush=True)
        print(json.dumps({"month_of_1000_ranks": month_cost()}))
        return 0
    forks.load()
    forks.own_template()
    series = Series(args.series, args.output, args.jobs, args.limit)
    cases = cases_of(args, series)
    chosen = {
        name: case for name, case in cases.items() if not args.only or any(word in name for word in args.only)
    }
    found = series.measure(chosen)
    if args.series == "what-if":
        print(json.dumps(measured.sum_up(found)), flush=True)
    return 0 if found and all(one["right"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
