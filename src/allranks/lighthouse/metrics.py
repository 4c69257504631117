"""The lighthouse's status as Prometheus text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from allranks.lighthouse.status import Status
from allranks.model.nodes import AGENT

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
    rows = [row for row in status.replicas if row.state != "observer"]
    yield from _metric(
        "allranks_step_max", "gauge", "Highest step of any replica", [("", max(step, status.training.step))]
    )
    yield from _training(status)
    yield from _metric(
        "allranks_leading", "gauge", "1 when this lighthouse leads", [("", int(status.leading))]
    )
    yield from _metric("allranks_connections", "gauge", "Open connections", [("", status.connections)])
    yield from _metric("allranks_up_seconds", "counter", "Seconds since the start", [("", status.up_s)])
    states = Counter(row.state for row in rows)
    states.update(one.kind for one in status.departed if one.replica not in {row.replica for row in rows})
    yield from _metric(
        "allranks_replicas",
        "gauge",
        "Replicas by state, those that are gone included",
        [(f'state="{_text(s)}"', n) for s, n in sorted(states.items())],
    )
    agents = sum(row.state == "observer" and row.replica.startswith(AGENT) for row in status.replicas)
    yield from _metric("allranks_agents", "gauge", "Connected agents, one per node", [("", agents)])
    yield from _metric(
        "allranks_events_total",
        "counter",
        "Events since the start, by kind (lost, left, evicted, quorum ...)",
        [(f'kind="{_text(k)}"', n) for k, n in sorted(status.events.items())],
    )
    yield from _incidents(status)
    for name, help_text, values in (
        ("step", "Step of a replica", [float(r.step) for r in rows]),
        ("heard_seconds", "Seconds since a replica was last heard", [round(r.heard_s, 3) for r in rows]),
        ("idle_seconds", "Seconds without progress of a replica", [round(r.idle_s, 3) for r in rows]),
    ):
        samples = [(f'replica="{_text(r.replica)}"', value) for r, value in zip(rows, values, strict=True)]
        yield from _metric(f"allranks_replica_{name}", "gauge", help_text, samples)


def _training(status: Status) -> Iterator[str]:
    """The first line of the page, in numbers."""
    training = status.training
    yield from _metric("allranks_steps_per_second", "gauge", "Steps per second, 0 when none is made", [("", training.steps_per_s or 0.0)])  # fmt: skip
    yield from _metric("allranks_stalled_seconds", "gauge", "Seconds without a step when that is unusually long, else 0", [("", training.stalled_s)])  # fmt: skip
    yield from _metric("allranks_replicas_missing", "gauge", "Replicas that were lost or evicted and are not back", [("", max(0, training.replicas - training.members))])  # fmt: skip
    moods = [(f'mood="{mood}"', int(training.mood == mood)) for mood in ("good", "warn", "bad")]
    yield from _metric("allranks_training", "gauge", "The colour of the page: 1 for green (good), amber (warn) or red (bad)", moods)  # fmt: skip


def _incidents(status: Status) -> Iterator[str]:
    yield from _metric("allranks_incidents", "gauge", "Incidents that this lighthouse remembers", [("", len(status.incidents))])  # fmt: skip
    opened = sum(not incident.closed for incident in status.incidents)
    yield from _metric("allranks_incidents_open", "gauge", "Incidents without a recovery", [("", opened)])
    causes = Counter(
        (incident.kind or "unknown", incident.cause or "unknown") for incident in status.incidents
    )
    samples = [(f'kind="{_text(k)}",cause="{_text(c)}"', float(n)) for (k, c), n in sorted(causes.items())]
    yield from _metric("allranks_incidents_by_cause", "gauge", "The same by kind and cause", samples)


def _metric(name: str, kind: str, help_text: str, samples: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
