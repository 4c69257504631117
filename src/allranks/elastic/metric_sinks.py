"""Where the metrics of a rank go: log, JSON lines, TensorBoard, Prometheus. Sinks take `TrainingMetrics.summary()` when the
caller says so; only the Prometheus server listens, in the process that trains.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from allranks.errors import MissingExtra
from allranks.model import metrics

log = logging.getLogger("allranks.metrics")
Summary: TypeAlias = Mapping[str, Any]
MAX_SCRAPES = 8  # at a time
SCRAPE_S = 10.0  # for a whole request and its answer


def _flat(summary: Summary, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) for every number; names joined by `_`."""
    for key, value in summary.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}_")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


class LogSink:
    """A few sentences in the log."""

    def write(self, summary: Summary) -> None:
        training, saves, recovery = summary["training"], summary["checkpoint"], summary["recovery"]
        speed, efficiency = training["tokens_per_second"], 100 * training["efficiency"]
        log.info("step %d, %.0f tokens/s, %.1f %% efficiency", training["current_step"], speed, efficiency)
        shares = {key[6:]: part for key, part in summary["goodput"].items() if key.startswith("share_")}
        lost = ", ".join(
            f"{what} {part:.1%}" for what, part in shares.items() if what != "useful" and part > 0.0005
        )
        rest = f"; the rest: {lost}" if lost else ""
        log.info("goodput %.1f %%%s", 100 * summary["goodput"]["ratio"], rest)
        if count := saves["total_saves"]:
            text = "%d saves, %.2f s on average, %d failed"
            log.info(text, count, saves["avg_save_time"], saves["async_failures"])
        if count := recovery["total_events"]:
            log.info("%d recoveries, %.2f s on average", count, recovery["avg_recovery_time"])


class JsonLinesSink:
    """One JSON object per write, appended to a file; a torn last line of an earlier run is ended first."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, summary: Summary, **more: object) -> None:
        line = json.dumps({"time": time.time(), **summary, **more}, allow_nan=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(line.encode() + b"\n")


class TensorBoardSink:
    """Event files in a folder, written by torch's own writer. Needs the tensorboard package."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("Writing for TensorBoard", "tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, summary: Summary) -> None:
        step = int(summary["training"]["current_step"])
        for group, values in summary.items():
            for name, number in _flat(values if isinstance(values, Mapping) else {group: values}):
                self._writer.add_scalar(f"{group}/{name}", number, step)

    def close(self) -> None:
        self._writer.close()


#: What is a counter for Prometheus; everything else is a gauge.
_COUNTERS = (
    "total_tokens total_saves total_loads total_events worker_joins worker_failures total_recovery_time "
    "total_steps clip_count async_failures async_retries lr_adjustments total_stall"
)


def prometheus_text(summary: Summary, labels: Mapping[str, str] | None = None) -> str:
    """The summary in Prometheus' text format, names beginning with `allranks_`."""
    where, counters = metrics.labels(**dict(sorted((labels or {}).items()))), tuple(_COUNTERS.split())
    found: list[metrics.Metric] = []
    for name, number in _flat(summary):
        kind = "counter" if name.endswith(counters) else "gauge"
        full = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
        found.append((full, kind, "", {where: number}))
    return "\n".join(metrics.render(found)) + "\n"


class _ScrapeServer(ThreadingHTTPServer):
    """In a process that trains: strangers get few threads, each for a short time as a whole; the oldest goes first."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, float] = {}  # connection -> until when, oldest first
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.05)  # it stays readable: without a pause this thread would take a core
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_SCRAPES:
                self._cut(next(iter(self._open)))
            self._open[request] = time.monotonic() + SCRAPE_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        with self._lock:
            for request in [one for one, until in self._open.items() if until < time.monotonic()]:
                self._cut(request)

    def _cut(self, request: Any) -> None:
        self._open.pop(request)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # ends its thread

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics request of %s failed", client_address, exc_info=True)


class PrometheusServer:
    """Serves /metrics until closed."""

    def __init__(self, server: ThreadingHTTPServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def serve_prometheus(
    summary: Callable[[], Summary],
    port: int = 0,
    host: str = "127.0.0.1",
    labels: Mapping[str, str] | None = None,
) -> PrometheusServer:
    """Starts a small server on a thread; port 0 picks a free one."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SCRAPE_S

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = prometheus_text(summary(), labels).encode()
            self.send_response(200)
            self.send_header("Content-Type", metrics.METRICS_KIND)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug("metrics request: " + format, *args)

    server = _ScrapeServer((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="allranks-metrics", daemon=True)
    thread.start()
    return PrometheusServer(server, thread)
