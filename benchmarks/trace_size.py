"""How large a Perfetto trace and a diagnose page are, and how long writing them takes, on an imagined job.

    python benchmarks/trace_size.py [--json] [--ranks 256] [--calls 2000]

Ends with 1 when the trace of 256 ranks x 2,000 calls is over 40 MB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from allranks.diagnosis import diagnose
from allranks.report import html, perfetto
from pages.gallery import make_traces

LIMIT_BYTES_PER_CALL = 40e6 / (256 * 2000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    traces = make_traces(args.ranks, args.calls)
    diagnosis = diagnose(traces)
    began = time.perf_counter()
    data = b"".join(perfetto.render(diagnosis, traces))
    took = time.perf_counter() - began
    print(f"{args.ranks} ranks x {args.calls} calls")
    print(
        f"perfetto trace: {len(data) / 1e6:.1f} MB in {took:.2f} s, {len(gzip.compress(data, 5)) / 1e6:.1f} MB gzipped"
    )
    began = time.perf_counter()
    page = "".join(html.render(diagnosis, traces))
    print(f"diagnose page: {len(page) / 1e6:.2f} MB in {time.perf_counter() - began:.2f} s")
    if args.json:
        numbers = {
            "ranks": args.ranks,
            "calls": args.calls,
            "perfetto_mb": len(data) / 1e6,
            "page_mb": len(page) / 1e6,
        }
        ratios = {"of_the_promise": len(data) / (LIMIT_BYTES_PER_CALL * args.ranks * args.calls)}
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"name": "trace_size", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return int(len(data) > LIMIT_BYTES_PER_CALL * args.ranks * args.calls)


if __name__ == "__main__":
    sys.exit(main())
