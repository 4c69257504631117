"""The lighthouse's status as Prometheus text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from allranks.lighthouse.status import Status

KIND = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(status: Status) -> Iterator[str]:
    """One line per sample, each metric with its help."""
    yield from _metric(
        "allranks_quorum_number", "gauge", "Number of the current quorum", [("", status.number)]
    )
    yield from _metric("allranks_epoch", "gauge", "Epoch (term) of the lighthouse", [("", status.epoch)])
    members = len(status.quorum.members) if status.quorum else 0
    yield from _metric("allranks_quorum_members", "gauge", "Members of the current quorum", [("", members)])
    step = status.quorum.max_step if status.quorum else 0
    steps = [row.step for row in status.replicas]
    yield from _metric(
        "allranks_step_max", "gauge", "Highest step of any replica", [("", max([step, *steps]))]
    )
    yield from _metric(
        "allranks_leading", "gauge", "1 when this lighthouse leads", [("", int(status.leading))]
    )
    yield from _metric("allranks_connections", "gauge", "Open connections", [("", status.connections)])
    yield from _metric("allranks_up_seconds", "counter", "Seconds since the start", [("", status.up_s)])
    states = Counter(row.state for row in status.replicas)
    yield from _metric(
        "allranks_replicas",
        "gauge",
        "Replicas by state",
        [(f'state="{_text(s)}"', n) for s, n in sorted(states.items())],
    )
    yield from _metric(
        "allranks_events_total",
        "counter",
        "Events since the start, by kind (lost, left, evicted, quorum ...)",
        [(f'kind="{_text(k)}"', n) for k, n in sorted(status.events.items())],
    )
    yield from _metric(
        "allranks_incidents", "gauge", "Incidents told to this lighthouse", [("", len(status.incidents))]
    )
    rows = status.replicas
    yield from _metric(
        "allranks_replica_step",
        "gauge",
        "Step of a replica",
        [(f'replica="{_text(r.replica)}"', r.step) for r in rows],
    )
    yield from _metric(
        "allranks_replica_heard_seconds",
        "gauge",
        "Seconds since a replica was last heard",
        [(f'replica="{_text(r.replica)}"', round(r.heard_s, 3)) for r in rows],
    )
    yield from _metric(
        "allranks_replica_idle_seconds",
        "gauge",
        "Seconds without progress of a replica",
        [(f'replica="{_text(r.replica)}"', round(r.idle_s, 3)) for r in rows],
    )


def _metric(name: str, kind: str, help_text: str, samples: list[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
