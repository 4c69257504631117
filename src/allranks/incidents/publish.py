"""Publishes an incident: its page, the lighthouse, webhooks, a copy in an object store. Runs in the agent.

A webhook gets a JSON POST: in Slack's format for `slack:URL` and hooks.slack.com, else with the whole incident.
`tensorboard:FOLDER`, `wandb:PROJECT` and `otlp:http://HOST:4318` (OpenTelemetry) write to those tools and need
allranks[tensorboard], allranks[wandb] or allranks[otel]. The original is the folder on disk, so failures are only logged.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from allranks.channel.worker import Worker, carefully
from allranks.errors import ConfigurationError, InputError, require
from allranks.incidents.folder import IncidentFolder, keep_newest
from allranks.incidents.rank_logs import find_logs, tail
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Incident
from allranks.model.files import write_atomically
from allranks.model.parsing import only_host, printable
from allranks.model.trace import RankTrace
from allranks.report import as_json
from allranks.report.story import chosen_ranks, headline, rank_evidence, render_story
from allranks.watch.samples import read_samples


def write_tensorboard(folder: str, incident: Incident, sentence: str) -> None:
    """Writes a text at the step of the incident, and the duration of the recovery."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    text = TensorProto(
        dtype=DT_STRING,
        string_val=[sentence.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    values = [Summary.Value(tag=f"incidents/{incident.kind}", metadata=kind, tensor=text)]
    if "recovered" in incident.durations_s:
        seconds = incident.durations_s["recovered"]
        values.append(Summary.Value(tag="incidents/recovered_s", simple_value=seconds))
    writer = EventFileWriter(folder)
    writer.add_event(Event(wall_time=time.time(), step=max(0, incident.step), summary=Summary(value=values)))
    writer.close()


def write_wandb(project: str, incident: Incident, sentence: str) -> None:
    """Writes an alert and a row to the run `incidents of JOB`."""
    import wandb

    run = wandb.init(
        project=project,
        id=hashlib.sha256(incident.job.encode()).hexdigest()[:16],
        name=f"incidents of {incident.job}",
        job_type="incidents",
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )
    try:
        facts = {f"incident/{name}_s": value for name, value in incident.durations_s.items()}
        run.log(
            {
                "incident/kind": incident.kind,
                "incident/step": incident.step,
                "incident/text": sentence,
                **facts,
            }
        )
        run.alert(title=f"{incident.kind} in {incident.job}", text=sentence)
    finally:
        run.finish()
        wandb.teardown()  # ends wandb's service process


def write_otlp(url: str, incident: Incident, sentence: str) -> None:
    """Sends a span from the first sign to the recovery, with the moments of the story as events. All spans of an incident belong to
    one trace."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import Status, StatusCode

    class OneTrace(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            name = f"{incident.job}/{incident.id}"
            return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big") or 1

    provider = TracerProvider(
        resource=Resource.create({"service.name": "allranks", "allranks.job": incident.job}),
        id_generator=OneTrace(),
    )
    target = url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=target, timeout=5)))
    begin = min((moment.at for moment in incident.timeline), default=incident.opened)
    span = provider.get_tracer("allranks").start_span(
        f"{incident.kind}: {sentence}"[:200],
        start_time=int(begin * 1e9),
        attributes={
            "allranks.incident": incident.id,
            "allranks.cause": incident.verdict.cause if incident.verdict is not None else incident.kind,
            "allranks.ranks": list(incident.ranks),
            "allranks.step": incident.step,
            "host.name": incident.node,
        },
    )
    for moment in incident.timeline:
        span.add_event(moment.name, {"text": moment.text}, timestamp=int(moment.at * 1e9))
    if incident.closed is None:
        span.set_status(Status(StatusCode.ERROR, sentence))
    span.end(end_time=int((incident.closed or time.time()) * 1e9))
    provider.shutdown()


#: scheme of an address -> (writer, required package, extra)
SINKS: dict[str, tuple[Callable[[str, Incident, str], None], str, str]] = {
    "tensorboard": (write_tensorboard, "tensorboard", "tensorboard"),
    "wandb": (write_wandb, "wandb", "wandb"),
    "otlp": (write_otlp, "opentelemetry.exporter.otlp.proto.http", "otel"),
}


def check_address(address: str) -> None:
    """Raises ConfigurationError for an address that cannot be used. The error does not show it, since it may hold a secret."""
    scheme, _, rest = address.partition(":")
    if scheme in SINKS and rest:
        _, package, extra = SINKS[scheme]
        require(package, feature=f"--webhook {scheme}:…", extra=extra)
    is_url = scheme not in ("tensorboard", "wandb")
    if not rest or (is_url and not _is_url(rest if scheme in ("slack", "otlp") else address)):
        raise ConfigurationError(
            "a webhook is not a valid address (not shown, since it may hold a secret)",
            hint="--webhook, recovery.webhooks and ALLRANKS_WEBHOOK take http://…, https://…, slack:https://…, "
            "otlp:http://…, tensorboard:DIR and wandb:PROJECT.",
        )


def _is_url(text: str) -> bool:
    """Whether urllib can send to this URL."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # wrong brackets or port
        return False
    return known and text.isascii() and text.isprintable() and " " not in text


log = logging.getLogger("allranks.agent")

MAX_FILE_BYTES = 256 << 20
MAX_COPIED = 10_000  # remembered files
CLOSE_S, WEBHOOKS_CLOSE_S = 30.0, 10.0  # limits at the end of the job
EVIDENCE = "evidence.json"  # stacks and last calls of the ranks, for the page of the job


@dataclass
class IncidentPublisher:
    """Sends incidents to all receivers. A failure of one does not affect the others; a slow one delays webhooks only."""

    webhooks: tuple[str, ...] = ()
    folder: Path | None = None  # of the job on this node, for the last lines of its ranks
    on_incident: Callable[[Incident], None] = lambda incident: None
    upload: Callable[[Path], None] = lambda folder: None  # `IncidentUploader.keep`
    book: Callable[[Incident], None] = lambda incident: None  # `LedgerKeeper.note`
    last: str = ""  # the newest verdict, as logged
    timeout_s: float = 5.0  # per attempt to reach a webhook
    _sender: Worker = field(default_factory=lambda: Worker("allranks-webhook"))

    def publish(self, opened: IncidentFolder) -> None:
        receivers: tuple[Callable[[], object], ...] = (
            lambda: self.write_page(opened),
            lambda: self.on_incident(opened.current),
            lambda: self.send(opened.current),
            lambda: self.upload(opened.path),
        )
        for notify in receivers:
            carefully(notify, "%s could not be published everywhere", opened.current.id)

    def send(self, incident: Incident) -> None:
        """Queues the incident for every webhook, in place of an older state in the queue. Stalls are not sent."""
        for address in self.webhooks if incident.kind != "stall" else ():
            work = partial(deliver, address, incident, headline(incident), timeout_s=self.timeout_s)
            self._sender.put(work, (address, incident.id))

    def close(self, timeout_s: float = WEBHOOKS_CLOSE_S) -> bool:
        """Waits for queued webhooks; False after the timeout."""
        return self._sender.close(timeout_s)

    def log(self, opened: IncidentFolder) -> None:
        """Logs the verdict in one line, with the path of its page."""
        story = opened.path.absolute() / "story.html"
        self.last = f"{headline(opened.current).rstrip('.')}; story: {story}"
        log.error("%s: %s", opened.current.id, self.last)

    def write_page(self, opened: IncidentFolder) -> None:
        """Writes the page in the incident's folder, and the ledger."""
        self.book(opened.current)
        report = opened.path / "diagnosis.txt"
        text = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
        lines, traces = tuple(text.splitlines()), _traces(opened)
        logs = {} if self.folder is None else self._logs(self.folder, chosen_ranks(opened.current))
        evidence = rank_evidence(opened.current, traces, logs)
        ranks = [one.to_dict() for one in evidence]
        verdict = opened.current.verdict
        advice = list(verdict.advice) if verdict is not None else []
        body = {"incident": opened.current.id, "advice": advice, "ranks": ranks, "timeline": bool(traces)}
        write_atomically(opened.path / EVIDENCE, json.dumps(body))
        write_atomically(opened.path / "story.html", render_story(opened.current, lines, evidence, traces))

    def _logs(self, folder: Path, ranks: Iterable[int]) -> dict[int, tuple[str, ...]]:
        boxes = {sample.rank: sample.path for sample in read_samples(folder)}
        return {rank: tail(find_logs(folder, rank, boxes[rank])) for rank in ranks if rank in boxes}


def payload(address: str, incident: Incident, sentence: str) -> tuple[str, dict[str, object]]:
    if address.startswith("slack:") or "//hooks.slack.com/" in address:
        lines = [f"*{incident.job}*: {sentence}"]
        if incident.action is not None:
            lines.append(f"{incident.action.kind.replace('_', ' ')}: {incident.action.reason}")
        lines.append(f"evidence: `{incident.folder.replace('`', chr(39))}`")
        text = "\n".join(lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return address.removeprefix("slack:"), {"text": text}
    return address, {"sentence": sentence, "incident": as_json.incident(incident)}


def deliver(
    address: str, incident: Incident, sentence: str, *, timeout_s: float = 5.0, attempts: int = 3
) -> bool:
    """Sends an incident to one address. A failure is logged and returns False."""
    scheme, _, target = address.partition(":")
    if scheme in SINKS:
        shown = only_host(target) if scheme == "otlp" else target
        write = partial(SINKS[scheme][0], target, incident, sentence)
        return carefully(write, "%s:%s did not take incident %s", scheme, shown, incident.id)
    where, body = payload(address, incident, sentence)
    return _post(where, body, timeout_s=timeout_s, attempts=attempts)


def _post(url: str, body: dict[str, object], *, timeout_s: float, attempts: int) -> bool:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    scheme, _, rest = url.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at:  # urllib does not support credentials in a URL
        headers["Authorization"] = f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}"
        url = f"{scheme}://{rest[len(user) + 1 :]}"
    for attempt in range(1, attempts + 1):
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s):
                return True
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = printable(str(error), 200)
            log.warning("webhook %s failed (%d of %d): %s", only_host(url), attempt, attempts, why)
            if isinstance(error, ValueError):
                return False
            time.sleep(min(2.0, 0.2 * attempt))
    return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would send the password to the other host, as a GET without the incident."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        text = f"redirect to {only_host(newurl)} not followed: configure that address instead"
        raise urllib.error.HTTPError(req.full_url, code, text, headers, fp)


class UploadTarget(Protocol):
    """The target of an upload (checkpoint/stores/object_store.py); `put` raises OSError."""

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None: ...


@dataclass
class IncidentUploader:
    """Copies incident folders. A second `keep` of a folder copies only changed files."""

    blobs: UploadTarget
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # file -> (size, mtime)
    _worker: Worker = field(default_factory=lambda: Worker("allranks-upload"))

    def keep(self, folder: Path) -> None:
        """Queues a folder."""
        self._worker.put(lambda: self._upload(folder), folder)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for queued folders."""
        if not self._worker.close(timeout_s):
            log.warning("not all incidents reached the object store within %g s", timeout_s)

    def _upload(self, folder: Path) -> None:
        begin = time.monotonic()
        try:
            copied = self._copy(folder)
        except OSError as error:
            log.warning("%s could not be copied to the object store: %s", folder.name, error)
            return
        if copied:
            took = time.monotonic() - begin
            log.info("%s: %d files copied to the object store in %.1f s", folder.name, copied, took)

    def _copy(self, folder: Path) -> int:
        copied = 0
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
            stat = path.stat()
            version = (stat.st_size, stat.st_mtime_ns)
            if self._copied.get(path) == version or stat.st_size > MAX_FILE_BYTES:
                continue
            data, key = path.read_bytes(), f"{folder.name}/{path.relative_to(folder).as_posix()}"
            self.blobs.put(key, [memoryview(data)], len(data))
            self._copied[path] = version
            keep_newest(self._copied, MAX_COPIED)
            copied += 1
        return copied


def _traces(opened: IncidentFolder) -> list[RankTrace]:
    """The black boxes of the ranks whose last calls the page shows; few, since the page is written before a restart."""
    boxes, ranks = opened.path / "boxes", chosen_ranks(opened.current)
    if not ranks or not boxes.is_dir():
        return []
    try:
        return load_paths([str(boxes)], LoadOptions(ranks=ranks, allow_nothing=True)).traces
    except (InputError, OSError) as error:
        log.warning("%s: no last calls: %s", opened.current.id, error)
        return []
