"""The actions that agents and users may request from a lighthouse, and the future that holds an answer.

Each action waits for its answer and raises LighthouseError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TypeVar

from allranks.channel.frames import JsonObject
from allranks.errors import LighthouseError
from allranks.model.cluster import (
    CollectEvidence,
    Failover,
    Gathering,
    NodeAnswer,
    NodeReport,
    Presence,
    PublishedIncident,
)

Body = CollectEvidence | NodeReport | Presence | PublishedIncident
T = TypeVar("T")


class PendingAnswer(Future[T]):
    """A future of one value or error. Any thread but the client's own may wait for it."""

    def __init__(self, on_timeout: Callable[[PendingAnswer[T], float], LighthouseError]) -> None:
        super().__init__()
        self._on_timeout = on_timeout

    def result(self, timeout: float | None = None) -> T:
        """The answer, or raises the error. At the timeout it gives up with an error that names the missing replicas."""
        if not self.wait(timeout):
            self.fail(self._on_timeout(self, timeout or 0.0))
        return super().result()

    def cancel(self) -> bool:
        """Gives up waiting, and notifies the lighthouse."""
        given_up = not self.done()
        if given_up:
            self.fail(self._on_timeout(self, 0.0))
        return given_up

    def wait(self, timeout_s: float | None) -> bool:
        """Waits without giving up; whether the answer has arrived."""
        return bool(wait((self,), timeout_s).done)

    def resolve(self, value: T) -> None:
        """Sets the value; only the first answer counts."""
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: LighthouseError) -> None:
        with suppress(InvalidStateError):
            self.set_exception(error)


class Actions:
    """Mixin of Client, which sends the commands."""

    _command: Callable[..., JsonObject]

    def accuse(self, replica: str, reason: str) -> None:
        """Reports that a replica is dead; for an agent, which knows by pidfd."""
        self._command("accuse", replica, reason)

    def evict(self, replica: str, reason: str) -> None:
        """Evicts a replica until it is readmitted."""
        self._command("evict", replica, reason)

    def readmit(self, replica: str) -> None:
        """Lifts an eviction or a back-off."""
        self._command("let_in", replica)

    def finish(self, replica: str) -> None:
        """Reports that a departed replica completed its training; for an agent that saw it exit with 0."""
        self._command("finish", replica)

    def collect(self, reason: str, replicas: Iterable[str] = ()) -> str:
        """Asks agents for evidence; returns the incident's id."""
        body = self._command("collect", reason=reason, replicas=tuple(replicas))
        return str(body["incident"])

    def gather(self, wanted: CollectEvidence) -> Gathering:
        """Asks all other agents for their part of an incident; returns the leader, which may be another agent."""
        body = self._command("gather", body=wanted)
        return Gathering(str(body["incident"]), str(body["lead"]), tuple(body["agents"]))

    def present(self, presence: Presence) -> Failover:
        """Reports the ranks of an agent's node; returns the successor, for the case that the lighthouse's node is lost."""
        body = self._command("present", body=presence)
        return Failover(_presence(body.get("host")), str(body.get("successor") or ""))

    def presence(self, agent: str) -> Presence | None:
        """The last report of an agent, which may be lost; None when there is none."""
        return _presence(self._command("presence", agent).get("node"))

    def report_incident(self, incident: PublishedIncident) -> None:
        self._command("incident", body=incident)

    def report_node(self, report: NodeReport) -> NodeAnswer:
        """Reports an agent's ranks; returns what the lighthouse wants next."""
        body = self._command("report", body=report)
        return NodeAnswer(float(body["every_s"]), tuple(body["compare"]))

    def status(self) -> JsonObject:
        """The lighthouse's snapshot (lighthouse/status.py: Status) as plain JSON values."""
        return self._command("status")


def _presence(found: object) -> Presence | None:
    if not isinstance(found, dict):
        return None
    ranks = tuple(int(rank) for rank in found.get("ranks") or ())
    return Presence(str(found["agent"]), str(found["node"]), ranks, bool(found.get("lighthouse")))
