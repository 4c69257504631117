"""CPU of the lighthouse for one refresh of the job's page with many ranks, and the bytes that are sent.

    python benchmarks/job_page.py [--json] [--ranks 1024] [--limit-ms 20] [--limit-kb 300]

Ends with 1 when a refresh costs more than the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from allranks.lighthouse import page
from allranks.lighthouse.options import Options
from allranks.lighthouse.service import Service
from allranks.lighthouse.web import Web
from pages.jobs import replica_job, whole_job


async def measure(ranks: int, replicas: bool, rounds: int = 50) -> tuple[float, float, int]:
    """(CPU seconds of one refresh, of one row of the history, bytes of a refresh)."""
    service = Service(Options(heartbeat_timeout_s=600.0), asyncio.get_running_loop())
    service.start()
    (replica_job if replicas else whole_job)(service, ranks)
    web = Web(service, "")
    size = len(web._view())
    began = time.process_time()
    for _ in range(rounds):
        web._view()
    refresh = time.process_time()
    for _ in range(rounds):
        page.tick(service)
    ended = time.process_time()
    service.close()
    return (refresh - began) / rounds, (ended - refresh) / rounds, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--limit-ms", type=float, default=20.0)
    parser.add_argument("--limit-kb", type=float, default=300.0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    numbers: dict[str, float] = {"ranks": args.ranks}
    for name, replicas in (("whole", False), ("replicas", True)):
        took, tick, size = asyncio.run(measure(args.ranks, replicas))
        print(
            f"{args.ranks:,} ranks, {name}: {took * 1000:.2f} ms of CPU and {size / 1000:.1f} kB per refresh; {tick * 1000:.2f} ms per row of the history"
        )
        numbers |= {
            f"{name}_refresh_ms": round(took * 1000, 2),
            f"{name}_tick_ms": round(tick * 1000, 2),
            f"{name}_bytes": size,
        }
    worst_ms = max(numbers["whole_refresh_ms"], numbers["replicas_refresh_ms"])
    worst_kb = max(numbers["whole_bytes"], numbers["replicas_bytes"]) / 1000
    if args.json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        ratios = {"of_the_promise": round(worst_ms / args.limit_ms, 3)}
        print(json.dumps({"name": "job_page", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return int(worst_ms > args.limit_ms or worst_kb > args.limit_kb)


if __name__ == "__main__":
    sys.exit(main())
