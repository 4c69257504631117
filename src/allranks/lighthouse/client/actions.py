"""What agents and people may ask a lighthouse to do, and the promise of an answer that the client's thread keeps.

Each action waits for the answer and raises LighthouseError.
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
    """Resolved once, with a value or an error. Safe to wait for from any thread but the client's own."""

    def __init__(self, on_timeout: Callable[[PendingAnswer[T], float], LighthouseError]) -> None:
        super().__init__()
        self._on_timeout = on_timeout

    def result(self, timeout: float | None = None) -> T:
        """The answer. Raises the error it ended with; at the limit it gives up and says who was waited for."""
        if not self.wait(timeout):
            self.fail(self._on_timeout(self, timeout or 0.0))
        return super().result()

    def cancel(self) -> bool:
        """Gives up waiting, and tells the lighthouse."""
        given_up = not self.done()
        if given_up:
            self.fail(self._on_timeout(self, 0.0))
        return given_up

    def wait(self, timeout_s: float | None) -> bool:
        """Waits without giving up; whether there is an answer."""
        return bool(wait((self,), timeout_s).done)

    def resolve(self, value: T) -> None:
        """Keeps the promise; only the first answer counts."""
        with suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: LighthouseError) -> None:
        with suppress(InvalidStateError):
            self.set_exception(error)


class Actions:
    """Of a Client, which sends the commands."""

    _command: Callable[..., JsonObject]

    def accuse(self, replica: str, reason: str) -> None:
        """Says that a replica is dead, for those who can see it (an agent with a pidfd)."""
        self._command("accuse", replica, reason)

    def evict(self, replica: str, reason: str) -> None:
        """Evicts a replica until it is readmitted."""
        self._command("evict", replica, reason)

    def readmit(self, replica: str) -> None:
        """Takes an eviction or a back-off back."""
        self._command("let_in", replica)

    def finish(self, replica: str) -> None:
        """Says that a replica which has left was through with its training, for those who saw it end well."""
        self._command("finish", replica)

    def collect(self, reason: str, replicas: Iterable[str] = ()) -> str:
        """Asks agents for evidence; returns the incident's id."""
        body = self._command("collect", reason=reason, replicas=tuple(replicas))
        return str(body["incident"])

    def gather(self, wanted: CollectEvidence) -> Gathering:
        """Asks all other agents for their part of an incident; says who leads (another may have been first)."""
        body = self._command("gather", body=wanted)
        return Gathering(str(body["incident"]), str(body["lead"]), tuple(body["agents"]))

    def present(self, presence: Presence) -> Failover:
        """An agent says which ranks its node has; learns who speaks if the lighthouse goes with its own node."""
        body = self._command("present", body=presence)
        return Failover(_presence(body.get("host")), str(body.get("successor") or ""))

    def presence(self, agent: str) -> Presence | None:
        """What an agent, perhaps a lost one, has told of its node; None when nothing is known."""
        return _presence(self._command("presence", agent).get("node"))

    def report_incident(self, incident: PublishedIncident) -> None:
        self._command("incident", body=incident)

    def report_node(self, report: NodeReport) -> NodeAnswer:
        """An agent says what it sees of its ranks; what the lighthouse wants next."""
        body = self._command("report", body=report)
        return NodeAnswer(float(body["every_s"]), tuple(body["compare"]))

    def status(self) -> JsonObject:
        """Everything the lighthouse knows (lighthouse/status.py: Status), as plain JSON values."""
        return self._command("status")


def _presence(found: object) -> Presence | None:
    if not isinstance(found, dict):
        return None
    ranks = tuple(int(rank) for rank in found.get("ranks") or ())
    return Presence(str(found["agent"]), str(found["node"]), ranks, bool(found.get("lighthouse")))
