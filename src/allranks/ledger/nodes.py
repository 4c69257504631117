"""Which nodes fail or slow down again and again, over all jobs. Pure: events in, a list with reasons and confidence out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allranks.ledger.records import Outage
from allranks.ledger.summary import FAILURES, JobAccount
from allranks.model.formatting import count

FORGIVE_S = 14 * 86400.0
CONFIDENT, REPEATED = 0.9, 2  # so sure that it is not chance; at least so many events
SLOW_SHARE = 0.05  # of a job's time that others waited for ranks of a node
#: Causes that a program has on any node: they say nothing of the machine.
PROGRAM = ("mismatch", "wrong_order", "not_called", "exception", "raised", "divergence", "program")


@dataclass(frozen=True)
class NodeEvent:
    """Something bad that a node did in a job."""

    node: str
    job: str
    at: float  # epoch seconds
    cause: str
    text: str = ""


@dataclass(frozen=True)
class BadNode:
    node: str
    confidence: float
    reason: str
    events: int
    last: float


def events_of(found: JobAccount) -> list[NodeEvent]:
    """What a job's account says of its nodes."""
    events = [event for one in found.outages for event in outage_events(found.job, one, found.node_of)]
    waited: dict[str, float] = defaultdict(float)
    for rank, seconds in found.waiting_for.items():
        waited[found.node_of.get(rank, "")] += seconds
    for node, seconds in waited.items():
        share = seconds / max(found.rank_seconds, 1e-9)
        if node and share >= SLOW_SHARE and len(found.nodes) > 1:
            events.append(
                NodeEvent(
                    node, found.job, found.end, "slow", f"the others waited for it {share:.0%} of the time"
                )
            )
    return events


def outage_events(job: str, outage: Outage, node_of: dict[int, str]) -> list[NodeEvent]:
    """One for each node of a guilty rank; none for what a program does on any node."""
    if outage.kind not in (*FAILURES, "slow") or any(word in outage.cause for word in PROGRAM):
        return []
    if any(word in outage.text for word in (" raised ", "exited with code")):
        return []
    nodes = {node_of.get(rank, "") for rank in outage.ranks} - {""}
    return [
        NodeEvent(node, job, outage.begin, outage.cause, outage.text)
        for node in sorted(nodes or {outage.node} - {""})
    ]


def judge_nodes(
    events: Iterable[NodeEvent], nodes: Sequence[str], now: float, forgive_s: float = FORGIVE_S
) -> list[BadNode]:
    """Nodes with more bad events than chance explains, the worst first. `nodes`: all that were seen in this time."""
    by_node: dict[str, list[NodeEvent]] = defaultdict(list)
    for event in events:
        if event.at >= now - forgive_s:
            by_node[event.node].append(event)
    every = len({*nodes, *by_node})
    if every < 2:
        return []  # nothing to compare it with
    total = sum(len(found) for found in by_node.values())
    bad = []
    for node, found in by_node.items():
        if len(found) < REPEATED:
            continue
        usual = max((total - len(found)) / (every - 1), 0.1)
        confidence = min(0.99, round(1.0 - _at_least(len(found), usual), 3))
        if confidence >= CONFIDENT:
            causes = ", ".join(
                f"{number} x {cause.replace('_', ' ')}"
                for cause, number in Counter(e.cause for e in found).most_common(3)
            )
            jobs = len({event.job for event in found})
            reason = f"{count(len(found), 'incident')} in {count(jobs, 'job')} ({causes}); other nodes have {usual:.1f}"
            bad.append(BadNode(node, confidence, reason, len(found), max(event.at for event in found)))
    return sorted(bad, key=lambda one: (-one.confidence, -one.events, one.node))


def _at_least(number: int, mean: float) -> float:
    """How likely so many or more are by chance (Poisson)."""
    return max(0.0, 1.0 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(number)))
