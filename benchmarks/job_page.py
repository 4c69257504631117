"""CPU of the lighthouse for one refresh of the job's page with many replicas, and the bytes that are sent.

    python benchmarks/job_page.py [--json] [--replicas 1000] [--limit-ms 100]

Ends with 1 when a refresh costs more than the limit.
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

from allranks.lighthouse.options import Options
from allranks.lighthouse.service import Service
from allranks.lighthouse.web import Web
from pages.test_looks import fill


async def measure(replicas: int, rounds: int = 50) -> tuple[float, int]:
    """(CPU seconds of one refresh, bytes of it)."""
    service = Service(Options(heartbeat_timeout_s=600.0), asyncio.get_running_loop())
    service.start()
    fill(service, replicas)
    web = Web(service, "")
    size = len(web._status())
    began = time.process_time()
    for _ in range(rounds):
        web._status()
    took = (time.process_time() - began) / rounds
    service.close()
    return took, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    took, size = asyncio.run(measure(args.replicas))
    print(f"{args.replicas:,} replicas: {took * 1000:.1f} ms of CPU and {size / 1000:.0f} kB per refresh")
    if args.json:
        numbers = {"replicas": args.replicas, "refresh_ms": round(took * 1000, 1), "bytes": size}
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        ratios = {"of_the_promise": round(took * 1000 / args.limit_ms, 3)}
        print(json.dumps({"name": "job_page", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return int(took * 1000 > args.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
