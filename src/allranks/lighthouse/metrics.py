"""The lighthouse's status as Prometheus text. Pure. By hand: docs/architecture.md says what prometheus_client costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from allranks.lighthouse.status import ReplicaStatus, Status
from allranks.model.job import AGENT

KIND = "text/plain; version=0.0.4; charset=utf-8"
#: name, type, help, and the samples: one value, or one for each set of labels
Metric = tuple[str, str, str, float | Mapping[str, float]]


def render_metrics(status: Status) -> Iterator[str]:
    """One line per sample, each metric with its help."""
    rows = [row for row in status.replicas if row.state != "observer"]
    for metrics in (_lighthouse(status), _training(status), _incidents(status), _replicas(status, rows)):
        for name, kind, help_text, samples in metrics:
            yield f"# HELP allranks_{name} {help_text}"
            yield f"# TYPE allranks_{name} {kind}"
            if isinstance(samples, Mapping):
                yield from (f"allranks_{name}{{{labels}}} {value}" for labels, value in samples.items())
            else:
                yield f"allranks_{name} {samples}"


def _lighthouse(status: Status) -> list[Metric]:
    members = len(status.quorum.members) if status.quorum else 0
    agents = sum(row.state == "observer" and row.replica.startswith(AGENT) for row in status.replicas)
    events = {f'kind="{_text(kind)}"': count for kind, count in sorted(status.events.items())}
    return [
        ("quorum_number", "gauge", "Number of the current quorum", status.number),
        ("epoch", "gauge", "Epoch (term) of the lighthouse", status.epoch),
        ("quorum_members", "gauge", "Members of the current quorum", members),
        ("leading", "gauge", "1 when this lighthouse leads", int(status.leading)),
        ("connections", "gauge", "Open connections", status.connections),
        ("up_seconds", "counter", "Seconds since the start", status.up_s),
        ("agents", "gauge", "Connected agents, one per node", agents),
        (
            "events_total",
            "counter",
            "Events since the start, by kind (lost, left, evicted, quorum ...)",
            events,
        ),
    ]


def _training(status: Status) -> list[Metric]:
    """The first line of the page, in numbers."""
    training = status.training
    step = max(status.quorum.max_step if status.quorum else 0, training.step)
    missing = max(0, training.replicas - training.members)
    moods = {f'mood="{mood}"': float(int(training.mood == mood)) for mood in ("good", "warn", "bad")}
    return [
        ("step_max", "gauge", "Highest step of any replica", step),
        ("steps_per_second", "gauge", "Steps per second, 0 when none is made", training.steps_per_s or 0.0),
        (
            "stalled_seconds",
            "gauge",
            "Seconds without a step when that is unusually long, else 0",
            training.stalled_s,
        ),
        ("replicas_missing", "gauge", "Replicas that were lost or evicted and are not back", missing),
        ("training", "gauge", "The colour of the page: 1 for green (good), amber (warn) or red (bad)", moods),
    ]


def _incidents(status: Status) -> list[Metric]:
    causes = Counter((each.kind or "unknown", each.cause or "unknown") for each in status.incidents)
    by_cause = {f'kind="{_text(k)}",cause="{_text(c)}"': float(n) for (k, c), n in sorted(causes.items())}
    return [
        ("incidents", "gauge", "Incidents that this lighthouse remembers", len(status.incidents)),
        (
            "incidents_open",
            "gauge",
            "Incidents without a recovery",
            sum(not i.closed for i in status.incidents),
        ),
        ("incidents_by_cause", "gauge", "The same by kind and cause", by_cause),
    ]


def _replicas(status: Status, rows: list[ReplicaStatus]) -> list[Metric]:
    here = {row.replica for row in rows}
    states = Counter(row.state for row in rows)
    states.update(one.kind for one in status.departed if one.replica not in here)
    labels = {row.replica: f'replica="{_text(row.replica)}"' for row in rows}
    return [
        (
            "replicas",
            "gauge",
            "Replicas by state, those that are gone included",
            {f'state="{_text(state)}"': count for state, count in sorted(states.items())},
        ),
        (
            "replica_step",
            "gauge",
            "Step of a replica",
            {labels[row.replica]: float(row.step) for row in rows},
        ),
        (
            "replica_heard_seconds",
            "gauge",
            "Seconds since a replica was last heard",
            {labels[row.replica]: round(row.heard_s, 3) for row in rows},
        ),
        (
            "replica_idle_seconds",
            "gauge",
            "Seconds without progress of a replica",
            {labels[row.replica]: round(row.idle_s, 3) for row in rows},
        ),
    ]


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
