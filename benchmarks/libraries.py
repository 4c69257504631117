"""What libraries would cost the lighthouse in place of our own few lines, in CPU time on its one thread.

    python benchmarks/libraries.py          (needs: pip install prometheus_client h11)

/metrics of 1,000 replicas with prometheus_client, and one HTTP request with h11; the best of five rounds. And what asyncio and
msgspec would add to the start of the liveness proxy, for which a rank that starts again waits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import allranks
from allranks.lighthouse.http import _parse_head
from allranks.lighthouse.status import ReplicaStatus, Status
from allranks.lighthouse.web import render_metrics

NAMES = [f"replica-{number}" for number in range(1000)]
ROWS = tuple(ReplicaStatus(name, "s", "n", "member", 7, 7, 0.0, "", 0.1, "a:1", 1) for name in NAMES)
STATUS = Status(1, "a:1", True, "a:1", 1, 1, "", "", None, ROWS, {}, {}, (), (), 1.0, 0.0, 1)
HEAD = b"GET /api/status HTTP/1.1\r\nHost: localhost:29510\r\nUser-Agent: curl/8.0\r\nAccept: */*"


def main() -> None:
    """Prints a table, and one JSON object as the last line."""
    numbers = {
        "metrics_ours_ms": best(ours, 10) * 1e3,
        "metrics_prometheus_client_ms": best(prometheus(), 5) * 1e3,
        "import_prometheus_client_ms": import_ms("prometheus_client"),
        "request_ours_us": best(lambda: _parse_head(HEAD), 2000) * 1e6,
        "request_h11_us": best(h11_request, 1000) * 1e6,
        "proxy_start_ms": proxy_start_ms(),
        "proxy_start_asyncio_ms": proxy_start_ms("asyncio"),
        "proxy_start_msgspec_ms": proxy_start_ms("msgspec"),
    }
    for name, value in numbers.items():
        print(f"{name:<30} {value:.1f}")
    print(json.dumps({"name": "libraries", "numbers": numbers}))


def ours() -> str:
    return "\n".join(render_metrics(STATUS))


def prometheus() -> Callable[[], Any]:
    """The three metrics that each replica has, by a collector of prometheus_client."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import GaugeMetricFamily

    class Replicas:
        def collect(self) -> Iterator[Any]:
            for name in ("step", "heard_seconds", "idle_seconds"):
                family = GaugeMetricFamily(f"allranks_replica_{name}", "Help", labels=["replica"])
                for replica in NAMES:
                    family.add_metric([replica], 1.5)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Replicas())
    return lambda: generate_latest(registry)


def h11_request() -> None:
    import h11

    connection = h11.Connection(h11.SERVER)
    connection.receive_data(HEAD + b"\r\n\r\n")
    connection.next_event()


def import_ms(name: str) -> float:
    """CPU time of importing it in a new process, over one that imports nothing."""

    def run(code: str) -> float:
        code = f"import time; b = time.process_time(); {code}; print(time.process_time() - b)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(done.stdout)

    return (min(run(f"import {name}") for _ in range(3)) - run("pass")) * 1e3


def proxy_start_ms(library: str = "sys") -> float:
    """CPU time of the liveness proxy's imports in a new process, with one library more."""
    paths = [str(Path(module.__file__).parents[1]) for module in (allranks, msgspec)]
    code = f"import sys, time; sys.path += {paths if library == 'msgspec' else paths[:1]}; import {library}; "
    code += "import allranks.lighthouse.client.liveness_proxy; print(time.process_time())"
    command = [sys.executable, "-I", "-S", "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(7)]
    return min(float(done.stdout) for done in runs) * 1e3


def best(function: Callable[[], object], count: int) -> float:
    """Seconds of CPU of one call."""
    times = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(count):
            function()
        times.append((time.process_time() - began) / count)
    return min(times)


if __name__ == "__main__":
    main()
