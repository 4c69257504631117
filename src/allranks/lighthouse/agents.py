"""The lighthouse's dealings with the agents of the nodes: who is gone with its node, evidence, incidents.

Agents are observers: they ask for no quorum. Runs on the loop's thread only.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from allranks.lighthouse.event_log import EventLog
from allranks.lighthouse.nodes import Current, Nodes, decide_gathering
from allranks.lighthouse.quorum_coordinator import Timers
from allranks.lighthouse.sessions import Session, Sessions
from allranks.model.cluster import CollectEvidence, Gathering, Incident, MemberLeft, MemberLost
from allranks.model.nodes import AGENT

MAX_STORIES = 100


@dataclass
class Agents:
    """See the module. What is told goes out at once."""

    sessions: Sessions
    bulletin: EventLog
    timers: Timers
    now: Callable[[], float]
    serving: Callable[[], bool]  # whether this lighthouse leads and is not closing
    nodes: Nodes = field(default_factory=Nodes)
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=200))
    stories: dict[str, str] = field(default_factory=dict)  # incident -> its page
    _gathering: Current | None = None

    def leave(self, name: str, reason: str) -> None:
        """An observer said good-bye; its node, if it has one, is not lost."""
        if name.startswith(AGENT):
            self.nodes.leave(name)
            self.bulletin.tell(MemberLeft(name, reason), self.sessions.observers)
            self.bulletin.flush()

    def lose(self, session: Session, patience_s: float) -> None:
        """An agent that is gone took its node's ranks with it: the others are told, unless it comes back in time."""
        if not session.replica.startswith(AGENT):
            return
        if patience_s:
            self.timers.call_later(patience_s, self._tell_node_lost, session, False)
        else:
            self._tell_node_lost(session, True)

    def _tell_node_lost(self, session: Session, certain: bool) -> None:
        name = session.replica
        if name in self.sessions.observers or not self.serving():
            return
        now = self.now()
        found = self.nodes.lose(name, session.node)
        heard = f"nothing heard of its agent for {now - session.heard:.1f} s"
        how = "was cut and did not come back" if session.cut else "closed without a good-bye"
        reason = f"its agent's connection {how}" if certain or session.cut else heard
        self.bulletin.event("lost", f"node {found.node} lost: {reason}", name)
        ms = round((now - session.heard) * 1000, 3)
        notice = MemberLost(name, reason, session.session, ms=ms, certain=certain)
        self.bulletin.tell(notice, self.sessions.observers)
        self.bulletin.flush()

    def collect(self, reason: str, replicas: Iterable[str] = ()) -> str:
        """Asks agents (observers) and the named replicas for evidence; returns the incident's id."""
        names = tuple(replicas)
        incident = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self.bulletin.event("collect", f"evidence wanted: {reason}", ", ".join(names))
        targets = self.sessions.observers | set(names or self.sessions.by_replica)
        self.bulletin.tell(CollectEvidence(incident, reason, names), targets)
        self.bulletin.flush()
        return incident

    def gather(self, wanted: CollectEvidence) -> Gathering:
        """Asks all agents but the leading one to send it their part of an incident; says who leads."""
        now = self.now()
        found, new = decide_gathering(now, wanted, self._gathering, self.sessions.observers)
        if wanted.alone and found.lead == wanted.lead:
            self._gathering = Current(found, now)
        if new:
            self.bulletin.event("collect", f"evidence wanted of {len(found.agents)} agents: {wanted.reason}")
            self.bulletin.tell(wanted, found.agents)
            self.bulletin.flush()
        return found

    @property
    def count(self) -> int:
        """How many agents are connected."""
        return sum(1 for name in self.sessions.observers if name.startswith(AGENT))

    def tell_incident(self, incident: Incident) -> None:
        """An agent tells what it found, or how an earlier finding ended; the story is kept for the page."""
        known = next(
            (index for index, one in enumerate(self.incidents) if one.incident == incident.incident), None
        )
        if incident.story:
            self.stories[incident.incident] = incident.story
            if len(self.stories) > MAX_STORIES:
                del self.stories[next(iter(self.stories))]
        at = incident.at or (time.time() if known is None else self.incidents[known].at)
        story = f"/incidents/{incident.incident}" if incident.incident in self.stories else ""
        kept = replace(incident, at=at, story=story)
        new = known is None or self.incidents[known].sentence != kept.sentence
        if known is None:
            self.incidents.append(kept)
        else:
            self.incidents[known] = kept
        if new:
            self.bulletin.event("incident", incident.sentence, ", ".join(incident.replicas))
