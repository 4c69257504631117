"""Incidents in the tools that people watch their runs with. Runs in the thread of the webhooks.

An address of `--webhook` chooses one: `tensorboard:FOLDER`, `wandb:PROJECT`, `otlp:http://HOST:4318` (OpenTelemetry).
Each needs its package: allranks[tensorboard], allranks[wandb], allranks[otel].
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from allranks.errors import require
from allranks.model.incident import Incident


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
    """Raises MissingExtra at the start of a job, not at its first incident."""
    scheme = address.partition(":")[0]
    if scheme in SINKS:
        _, package, extra = SINKS[scheme]
        require(package, feature=f"--webhook {scheme}:…", extra=extra)
