"""The lighthouse's metrics for Prometheus. Written by hand: see docs/decisions.md for the cost of prometheus_client. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from allranks.lighthouse.status import ReplicaStatus, Status
from allranks.model.cluster import AGENT

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
#: name, type, help ("": none), and the samples: one value, or one for each set of labels
Metric = tuple[str, str, str, float | Mapping[str, float]]
#: Rank-seconds by what the ranks did, from the ledger of this process' agent: for /metrics and the job's page.
SPENT: list[Callable[[], Mapping[str, float]]] = []
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels(**values: str) -> str:
    """Labels as written between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())


def render(metrics: Iterable[Metric]) -> Iterator[str]:
    """One line per sample, after its metric's help and type; names begin with `allranks_`."""
    for name, kind, text, samples in metrics:
        if text:
            yield f"# HELP allranks_{name} {text}"
        yield f"# TYPE allranks_{name} {kind}"
        for where, value in samples.items() if isinstance(samples, Mapping) else (("", samples),):
            yield f"allranks_{name}{f'{{{where}}}' if where else ''} {value}"


def render_metrics(status: Status) -> Iterator[str]:
    """One line per sample, each metric with its help."""
    rows = [row for row in status.replicas if row.state != "observer"]
    parts = (
        _lighthouse(status),
        _training(status),
        _incidents(status),
        _replicas(status, rows),
        spent_metrics(),
    )
    return render([metric for part in parts for metric in part])


def spent_metrics() -> list[Metric]:
    """Where the time of this node's ranks went; empty without a ledger in this process."""
    spent = SPENT[-1]() if SPENT else {}
    if not (total := sum(spent.values())):
        return []
    by_state = {labels(state=state): round(seconds, 3) for state, seconds in spent.items()}
    ratio = round(spent.get("useful", 0.0) / total, 4)
    return [
        ("goodput_ratio", "gauge", "Share of the ranks' time that was useful training", ratio),
        ("rank_seconds", "gauge", "Time of the ranks by what they did", by_state),
    ]


def _lighthouse(status: Status) -> list[Metric]:
    members = len(status.quorum.members) if status.quorum else 0
    agents = sum(row.state == "observer" and row.replica.startswith(AGENT) for row in status.replicas)
    events = {labels(kind=kind): count for kind, count in sorted(status.events.items())}
    by_kind = "Events since the start, by kind (lost, left, evicted, quorum ...)"
    return [
        ("quorum_number", "gauge", "Number of the current quorum", status.number),
        ("epoch", "gauge", "Epoch (term) of the lighthouse", status.epoch),
        ("quorum_members", "gauge", "Members of the current quorum", members),
        ("leading", "gauge", "1 when this lighthouse leads", int(status.leading)),
        ("connections", "gauge", "Open connections", status.connections),
        ("up_seconds", "counter", "Seconds since the start", status.up_s),
        ("agents", "gauge", "Connected agents, one per node", agents),
        ("events_total", "counter", by_kind, events),
    ]


def _training(status: Status) -> list[Metric]:
    """The first line of the page, in numbers."""
    training = status.training
    step = max(status.quorum.max_step if status.quorum else 0, training.step)
    missing = max(0, training.replicas - training.members)
    states = {labels(state=state): float(int(training.state == state)) for state in ("good", "warn", "bad")}
    unusual = "Seconds without a step when that is unusually long, else 0"
    colour = "The colour of the page: 1 for green (good), amber (warn) or red (bad)"
    tokens, mfu = (
        {"": value} if value is not None else {} for value in (training.tokens_per_s, training.mfu)
    )
    return [
        ("step_max", "gauge", "Highest step of any replica", step),
        ("steps_per_second", "gauge", "Steps per second, 0 when none is made", training.steps_per_s or 0.0),
        ("tokens_per_second", "gauge", "Tokens per second of all ranks, when scripts give them", tokens),
        ("mfu_ratio", "gauge", "Share of the GPUs' dense bf16 peak that is used, when it is known", mfu),
        ("stalled_seconds", "gauge", unusual, training.stalled_s),
        ("replicas_missing", "gauge", "Replicas that were lost or evicted and have not returned", missing),
        ("training", "gauge", colour, states),
    ]


def _incidents(status: Status) -> list[Metric]:
    causes = Counter((each.kind or "unknown", each.cause or "unknown") for each in status.incidents)
    by_cause = {labels(kind=k, cause=c): float(n) for (k, c), n in sorted(causes.items())}
    still_open = sum(not each.closed for each in status.incidents)
    return [
        ("incidents", "gauge", "Incidents that this lighthouse remembers", len(status.incidents)),
        ("incidents_open", "gauge", "Incidents without a recovery", still_open),
        ("incidents_by_cause", "gauge", "The same by kind and cause", by_cause),
    ]


def _replicas(status: Status, rows: list[ReplicaStatus]) -> list[Metric]:
    here = {row.replica for row in rows}
    states = Counter(row.state for row in rows)
    states.update(one.kind for one in status.departed if one.replica not in here)
    named = {labels(replica=row.replica): row for row in rows}
    by_state = {labels(state=state): count for state, count in sorted(states.items())}
    steps = {label: float(row.step) for label, row in named.items()}
    heard = {label: round(row.heard_s, 3) for label, row in named.items()}
    idle = {label: round(row.idle_s, 3) for label, row in named.items()}
    return [
        ("replicas", "gauge", "Replicas by state, those that are gone included", by_state),
        ("replica_step", "gauge", "Step of a replica", steps),
        ("replica_heard_seconds", "gauge", "Seconds since a replica was last heard", heard),
        ("replica_idle_seconds", "gauge", "Seconds without progress of a replica", idle),
    ]
