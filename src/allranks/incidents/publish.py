"""Publishes an incident: its page, the lighthouse, webhooks, a copy in an object store. Runs in the agent.

A webhook gets one JSON POST: `slack:URL` (or a hooks.slack.com address) in Slack's shape, anything else the whole
incident. `tensorboard:FOLDER`, `wandb:PROJECT` and `otlp:http://HOST:4318` (OpenTelemetry) go to those tools; each needs its
package: allranks[tensorboard], allranks[wandb], allranks[otel]. The folder on disk stays the original: what fails here is
logged.
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
    """A text at the step of the incident, and how long the recovery took."""
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
    """An alert and a row in a run of its own, `incidents of JOB`; offline as WANDB_MODE says."""
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
        wandb.teardown()  # else its service process would stay with the agent


def write_otlp(url: str, incident: Incident, sentence: str) -> None:
    """A span from the first sign to the recovery, with the moments of the story as its events. All spans of an
    incident are of one trace."""
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


#: scheme of an address -> (what writes, the package that it needs, the extra that brings it)
SINKS: dict[str, tuple[Callable[[str, Incident, str], None], str, str]] = {
    "tensorboard": (write_tensorboard, "tensorboard", "tensorboard"),
    "wandb": (write_wandb, "wandb", "wandb"),
    "otlp": (write_otlp, "opentelemetry.exporter.otlp.proto.http", "otel"),
}


def check_address(address: str) -> None:
    """Raises at the start of a job, not at its first incident; the error does not show the address, which may be a secret."""
    scheme, _, rest = address.partition(":")
    if scheme in SINKS and rest:
        _, package, extra = SINKS[scheme]
        require(package, feature=f"--webhook {scheme}:…", extra=extra)
    is_url = scheme not in ("tensorboard", "wandb")
    if not rest or (is_url and not _is_url(rest if scheme in ("slack", "otlp") else address)):
        raise ConfigurationError(
            "a webhook is not an address that incidents can be sent to (not shown: it may hold a secret)",
            hint="--webhook, recovery.webhooks and ALLRANKS_WEBHOOK take http://…, https://…, slack:https://…, "
            "otlp:http://…, tensorboard:DIR and wandb:PROJECT.",
        )


def _is_url(text: str) -> bool:
    """Whether urllib can send something there."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that is none
        return False
    return known and text.isascii() and text.isprintable() and " " not in text


log = logging.getLogger("allranks.agent")

MAX_FILE_BYTES = 256 << 20
MAX_COPIED = 10_000  # files whose version is remembered
CLOSE_S, WEBHOOKS_CLOSE_S = 30.0, 10.0  # at the end of the job
EVIDENCE = "evidence.json"  # stacks and last calls of the ranks, for the page of the job


@dataclass
class IncidentPublisher:
    """A receiver that fails stops neither the others nor the loop; a slow one holds up webhooks only."""

    webhooks: tuple[str, ...] = ()
    folder: Path | None = None  # of the job on this node, for the last lines of its ranks
    on_incident: Callable[[Incident], None] = lambda incident: None
    upload: Callable[[Path], None] = lambda folder: None  # `IncidentUploader.keep`
    book: Callable[[Incident], None] = lambda incident: None  # of the ledger
    last: str = ""  # the newest verdict, as it was logged
    timeout_s: float = 5.0  # of one attempt to reach a webhook
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
        """To every webhook, soon; of an incident that changed meanwhile the newest state. A stall needs nobody."""
        for address in self.webhooks if incident.kind != "stall" else ():
            work = partial(deliver, address, incident, headline(incident), timeout_s=self.timeout_s)
            self._sender.put(work, (address, incident.id))

    def close(self, timeout_s: float = WEBHOOKS_CLOSE_S) -> bool:
        """Whether all webhooks were reached or given up within the time."""
        return self._sender.close(timeout_s)

    def log(self, opened: IncidentFolder) -> None:
        """The verdict in the log: one whole line, with the page that has the rest."""
        story = opened.path.absolute() / "story.html"
        self.last = f"{headline(opened.current).rstrip('.')}; story: {story}"
        log.error("%s: %s", opened.current.id, self.last)

    def write_page(self, opened: IncidentFolder) -> None:
        """Only the page in the incident's folder, and the ledger."""
        self.book(opened.current)
        report = opened.path / "diagnosis.txt"
        lines = (
            tuple(report.read_text(encoding="utf-8", errors="replace").splitlines())
            if report.exists()
            else ()
        )
        traces = _traces(opened)
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
    """Whether the address took it; failures are logged."""
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
    if at:  # urllib would take it for a part of the host's name
        headers["Authorization"] = f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}"
        url = f"{scheme}://{rest[len(user) + 1 :]}"
    for attempt in range(1, attempts + 1):
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.build_opener(_NotFollowed).open(request, timeout=timeout_s):
                return True
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.warning(
                "webhook %s failed (%d of %d): %s",
                only_host(url),
                attempt,
                attempts,
                printable(str(error), 200),
            )
            if isinstance(error, ValueError):
                return False
            time.sleep(min(2.0, 0.2 * attempt))
    return False


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """urllib would carry the password to the other host, as a GET without the incident."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        text = f"it redirects to {only_host(newurl)}, which is not followed: give that address"
        raise urllib.error.HTTPError(req.full_url, code, text, headers, fp)


class UploadTarget(Protocol):
    """Where the bytes go (checkpoint/stores/object_store.py); `put` raises OSError."""

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None: ...


@dataclass
class IncidentUploader:
    """`keep` may be called again for the same folder: only what has changed is copied."""

    blobs: UploadTarget
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # file -> (size, mtime)
    _worker: Worker = field(default_factory=lambda: Worker("allranks-upload"))

    def keep(self, folder: Path) -> None:
        """Soon; returns at once."""
        self._worker.put(lambda: self._upload(folder), folder)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Copies what was asked for, within the time."""
        if not self._worker.close(timeout_s):
            log.warning("not all incidents reached the object store within %g s", timeout_s)

    def _upload(self, folder: Path) -> None:
        begin = time.monotonic()
        try:
            copied = self._copy(folder)
        except OSError as error:  # the original is on disk
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
            data = path.read_bytes()
            self.blobs.put(
                f"{folder.name}/{path.relative_to(folder).as_posix()}", [memoryview(data)], len(data)
            )
            self._copied[path] = version
            keep_newest(self._copied, MAX_COPIED)
            copied += 1
        return copied


def _traces(opened: IncidentFolder) -> list[RankTrace]:
    """The black boxes of the ranks whose last calls are shown; few, for this is written before a rank is restarted."""
    boxes, ranks = opened.path / "boxes", chosen_ranks(opened.current)
    if not ranks or not boxes.is_dir():
        return []
    try:
        return load_paths([str(boxes)], LoadOptions(ranks=ranks, allow_nothing=True)).traces
    except (InputError, OSError) as error:
        log.warning("%s: no last calls: %s", opened.current.id, error)
        return []
