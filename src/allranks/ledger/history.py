"""The history of nodes over all jobs, in an SQLite file or in PostgreSQL, and which nodes fail or slow down repeatedly.

Agents write it through `HistoryWriter`, on a thread and with limits, so that it never delays or fails a training. Lost writes
can be repeated from the ledgers with `allranks history --import`: every write replaces an earlier one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.channel.worker import Worker
from allranks.errors import InputError, require
from allranks.ledger.records import Outage
from allranks.ledger.summary import FAILURES, JobAccount
from allranks.model.formatting import count
from allranks.model.parsing import only_host

FORGIVE_S = 14 * 86400.0
CONFIDENT, REPEATED = 0.9, 2  # least confidence that it is not chance, least number of events
SLOW_SHARE = 0.05  # of a job's time that other ranks waited for ranks of a node
#: Causes that lie in the program and would appear on any node.
PROGRAM = ("mismatch", "wrong_order", "not_called", "exception", "raised", "divergence", "program")


@dataclass(frozen=True)
class NodeEvent:
    """A failure or slowdown of a node in a job."""

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
    """The events of a job's account."""
    events = [event for one in found.outages for event in outage_events(found.job, one, found.node_of)]
    waited: dict[str, float] = defaultdict(float)
    for rank, seconds in found.waiting_for.items():
        waited[found.node_of.get(rank, "")] += seconds
    for node, seconds in waited.items():
        share = seconds / max(found.rank_seconds, 1e-9)
        if node and share >= SLOW_SHARE and len(found.nodes) > 1:
            text = f"the others waited for it {share:.0%} of the time"
            events.append(NodeEvent(node, found.job, found.end, "slow", text))
    return events


def outage_events(job: str, outage: Outage, node_of: dict[int, str]) -> list[NodeEvent]:
    """One event per node of a guilty rank; none when the cause lies in the program."""
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
    """Nodes with more events than chance explains, the worst first. `nodes` are all nodes that ran jobs in this time."""
    by_node: dict[str, list[NodeEvent]] = defaultdict(list)
    for event in events:
        if event.at >= now - forgive_s:
            by_node[event.node].append(event)
    every = len({*nodes, *by_node})
    if every < 2:
        return []  # no other node to compare with
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
    """The probability of `number` or more events (Poisson)."""
    return max(0.0, 1.0 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(number)))


log = logging.getLogger("allranks.agent")

VARIABLE = "ALLRANKS_HISTORY"  # a file, a postgresql:// URL, or "off"
BUSY_S, TRIES = 5.0, 8
CLOSE_S = 5.0
_TABLES = (
    "CREATE TABLE IF NOT EXISTS node_events (node TEXT, job TEXT, at DOUBLE PRECISION, cause TEXT, body TEXT, "
    "PRIMARY KEY (node, job, at, cause))",
    "CREATE TABLE IF NOT EXISTS job_nodes (node TEXT, job TEXT, began DOUBLE PRECISION, ended DOUBLE PRECISION, "
    "rank_seconds DOUBLE PRECISION, useful DOUBLE PRECISION, PRIMARY KEY (node, job, began))",
)
_EVENT = (
    "INSERT INTO node_events VALUES ({0},{0},{0},{0},{0}) "
    "ON CONFLICT (node, job, at, cause) DO UPDATE SET body = excluded.body"
)
_NODE = (
    "INSERT INTO job_nodes VALUES ({0},{0},{0},{0},{0},{0}) ON CONFLICT (node, job, began) "
    "DO UPDATE SET ended = excluded.ended, rank_seconds = excluded.rank_seconds, useful = excluded.useful"
)


def default_place(environment: Mapping[str, str]) -> str:
    """ALLRANKS_HISTORY, else a file in the user's state folder; "" when the history is off."""
    if given := environment.get(VARIABLE):
        return "" if given == "off" else given
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "allranks" / "history.sqlite")


@dataclass(frozen=True)
class NodeHistory:
    """Opens a connection per operation. Errors are OSError for either database."""

    place: str  # a path, or postgresql://…

    @property
    def is_postgres(self) -> bool:
        return self.place.startswith(("postgresql://", "postgres://"))

    @property
    def shown(self) -> str:
        """For messages: without user and password."""
        return only_host(self.place) if self.is_postgres else self.place

    def record(
        self, events: Sequence[NodeEvent], runs: Sequence[tuple[str, str, float, float, float, float]] = ()
    ) -> None:
        """Writes everything in one transaction."""
        with self._connected(make=True) as (connection, mark):
            cursor = connection.cursor()
            for event in events:
                body = json.dumps({"text": event.text})
                cursor.execute(_EVENT.format(mark), (event.node, event.job, event.at, event.cause, body))
            for run in runs:
                cursor.execute(_NODE.format(mark), run)
            connection.commit()

    def record_job(self, found: JobAccount) -> None:
        """Writes the events and node times of a job's account."""
        runs = [
            (node, found.job, found.begin, found.end, sum(states.values()), states.get("useful", 0.0))
            for node, states in found.by_node.items()
        ]
        self.record(events_of(found), runs)

    def events(self, since: float = 0.0, node: str = "", cause: str = "", job: str = "") -> list[NodeEvent]:
        """Events, oldest first; "" matches any value."""
        wanted = {"node": node, "cause": cause, "job": job}
        with self._connected() as (connection, mark):
            cursor = connection.cursor()
            where = "".join(f" AND {name} = {mark}" for name, value in wanted.items() if value)
            values = (since, *(value for value in wanted.values() if value))
            cursor.execute(
                f"SELECT node, job, at, cause, body FROM node_events WHERE at >= {mark}{where} ORDER BY at",
                values,
            )
            return [
                NodeEvent(n, j, a, c, json.loads(b).get("text", "")) for n, j, a, c, b in cursor.fetchall()
            ]

    def nodes(self, since: float = 0.0) -> list[str]:
        """All nodes that ran a job since `since`."""
        with self._connected() as (connection, mark):
            cursor = connection.cursor()
            cursor.execute(f"SELECT DISTINCT node FROM job_nodes WHERE ended >= {mark}", (since,))
            return [name for (name,) in cursor.fetchall()]

    def bad_nodes(self, now: float, forgive_s: float = FORGIVE_S) -> list[BadNode]:
        since = now - forgive_s
        return judge_nodes(self.events(since), self.nodes(since), now, forgive_s)

    @contextmanager
    def _connected(self, make: bool = False) -> Iterator[tuple[Any, str]]:
        """A connection, and the placeholder of its database."""
        if self.is_postgres:
            require("psycopg", feature="a history in PostgreSQL", extra="postgres")
            import psycopg

            errors: tuple[type[Exception], ...] = (psycopg.Error,)
            open_it: Callable[[], Any] = lambda: psycopg.connect(self.place, connect_timeout=int(BUSY_S))  # noqa: E731
        else:
            errors, open_it = (sqlite3.Error,), lambda: self._open_file(make)
        try:
            with closing(open_it()) as connection:
                if make:
                    self._make_tables(connection)
                yield connection, "%s" if self.is_postgres else "?"
        except errors as error:
            raise OSError(f"the history {self.shown}: {str(error).strip()}") from error

    def _open_file(self, make: bool) -> sqlite3.Connection:
        path = Path(self.place)
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.exists():
            raise OSError(f"the history {self.place} does not exist")
        connection = sqlite3.connect(path, timeout=BUSY_S)
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _make_tables(self, connection: Any) -> None:
        if self.is_postgres:  # two sessions that create a table at the same time collide
            connection.execute("SELECT pg_advisory_xact_lock(4127)")
        for table in _TABLES:
            connection.execute(table)
        if self.is_postgres:
            connection.commit()


@dataclass
class HistoryWriter:
    """Writes on a thread of the agent. A failed write is tried a few times, then logged once."""

    history: NodeHistory
    _worker: Worker = field(default_factory=lambda: Worker("allranks-history"))
    _failed: bool = False

    def put(self, events: Sequence[NodeEvent]) -> None:
        if events:
            self._worker.put(lambda: self._try(lambda: self.history.record(events)))

    def put_job(self, read: Callable[[], JobAccount]) -> None:
        self._worker.put(lambda: self._try(lambda: self.history.record_job(read())))

    def close(self) -> None:
        self._worker.close(CLOSE_S)

    def _try(self, work: Callable[[], None]) -> None:
        for attempt in range(TRIES):
            try:
                work()
                self._failed = False
                return
            except (OSError, InputError) as error:
                problem = error
                if self._failed or "locked" not in str(error):
                    break
                time.sleep(random.uniform(0.05, 0.2) * (attempt + 1))
        if not self._failed:
            log.warning("history not written: %s; training continues (%s=off disables it)", problem, VARIABLE)
        self._failed = True


def start_history(environment: Mapping[str, str]) -> HistoryWriter | None:
    """The writer of this agent; None when the history is off."""
    place = default_place(environment)
    return HistoryWriter(NodeHistory(place)) if place else None


def known_bad(node: str, environment: Mapping[str, str] = os.environ) -> BadNode | None:
    """The verdict on a node; None when the node is not known as bad, or the history cannot be read."""
    place = default_place(environment)
    with suppress(OSError, InputError, ValueError):
        if place:
            return next((one for one in NodeHistory(place).bad_nodes(time.time()) if one.node == node), None)
    return None
