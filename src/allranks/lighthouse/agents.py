"""The agents of the nodes, as the lighthouse knows them: lost nodes, evidence, incidents.

Agents are observers: they request no quorum. All nodes of a job notice the same hang within moments: the first agent
leads, the others send it their evidence. A leader that is gone, or has not asked again for a while, is no longer
followed. Runs on the loop's thread only.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from allranks.lighthouse.quorum_coordinator import Timers
from allranks.lighthouse.ranks import RankTable
from allranks.lighthouse.sessions import EventLog, Session, Sessions
from allranks.model import cluster
from allranks.model.formatting import count

MAX_STORIES = 100
MAX_STORIES_CHARS = 32 << 20  # all together: pages of large jobs are long
_REMEMBERED = 256  # lost nodes

#: An agent whose connection was cut, or that is silent, may return by itself within this time.
CUT_BACK_S, SILENT_BACK_S = 0.4, 5.0


@dataclass
class Nodes:
    """What each agent has reported of its node."""

    present: dict[str, cluster.Presence] = field(default_factory=dict)
    lost: dict[str, cluster.Presence] = field(default_factory=dict)  # oldest first

    def note(self, presence: cluster.Presence) -> cluster.Failover:
        """An agent reports what runs on its node. Returns the successor, for the case that the lighthouse's node is lost."""
        self.present[presence.agent] = presence
        host = next((each for each in self.present.values() if each.lighthouse), None)
        rest = [name for name in self.present if host is None or name != host.agent]
        return cluster.Failover(host, min(rest, default=""))

    def leave(self, agent: str) -> None:
        """The agent has shut down cleanly: its node is not lost."""
        self.present.pop(agent, None)

    def lose(self, agent: str, node: str) -> cluster.Presence:
        """The agent is gone; its last report is kept."""
        found = self.present.pop(agent, None) or cluster.Presence(agent, node)
        self.lost[agent] = found
        if len(self.lost) > _REMEMBERED:
            del self.lost[next(iter(self.lost))]
        return found

    def find(self, agent: str) -> cluster.Presence | None:
        """The last report of a node, present or lost."""
        return self.present.get(agent) or self.lost.get(agent)


@dataclass(frozen=True)
class Current:
    """The last gathering that other agents follow."""

    gathering: cluster.Gathering
    asked_s: float


def decide_gathering(
    now_s: float, wanted: cluster.CollectEvidence, current: Current | None, observers: Collection[str]
) -> tuple[cluster.Gathering, bool]:
    """The gathering to which a request belongs, and whether agents must be notified of it."""
    if (
        wanted.alone
        and current is not None
        and current.gathering.lead != wanted.lead
        and current.gathering.lead in observers
        and now_s - current.asked_s < wanted.follow_s
    ):
        return current.gathering, False
    chosen = observers if not wanted.replicas else {*observers} & {*wanted.replicas}
    agents = sorted(name for name in chosen if name.startswith(cluster.AGENT) and name != wanted.lead)
    return cluster.Gathering(wanted.incident, wanted.lead, tuple(agents)), bool(agents)


@dataclass
class Agents:
    """See the module. Messages are sent at once."""

    sessions: Sessions
    event_log: EventLog
    timers: Timers
    now: Callable[[], float]
    serving: Callable[[], bool]  # whether this lighthouse leads and is not closing
    nodes: Nodes = field(default_factory=Nodes)
    ranks: RankTable = field(default_factory=RankTable)
    incidents: deque[cluster.PublishedIncident] = field(default_factory=lambda: deque(maxlen=200))
    stories: dict[str, str] = field(default_factory=dict)  # incident -> its page
    evidence: dict[str, str] = field(default_factory=dict)  # incident -> stacks and last calls as JSON
    _gathering: Current | None = None

    def leave(self, name: str, reason: str) -> None:
        """An observer has shut down cleanly; if it is an agent, its node is not lost."""
        if name.startswith(cluster.AGENT):
            self.nodes.leave(name)
            self.ranks.drop(name, lost=False)
            self.event_log.notify(cluster.MemberLeft(name, reason), self.sessions.observers)
            self.event_log.flush()

    def lose(self, session: Session, patience_s: float) -> None:
        """A lost agent means a lost node: notifies the other agents, unless this one returns within `patience_s`."""
        if not session.replica.startswith(cluster.AGENT):
            return
        if patience_s:
            self.timers.call_later(patience_s, self._notify_node_lost, session, False)
        else:
            self._notify_node_lost(session, True)

    def _notify_node_lost(self, session: Session, certain: bool) -> None:
        name = session.replica
        if name in self.sessions.observers or not self.serving():
            return
        now = self.now()
        found = self.nodes.lose(name, session.node)
        self.ranks.drop(name, lost=True)
        heard = f"nothing heard of its agent for {now - session.heard:.1f} s"
        if session.cut:
            reason = "its agent's connection was cut and did not come back"
        else:
            reason = "its agent exited without shutting down" if certain else heard
        self.event_log.event("lost", f"node {found.node} lost: {reason}", name)
        ms = round((now - session.heard) * 1000, 3)
        notice = cluster.MemberLost(name, reason, session.session, ms=ms, certain=certain)
        self.event_log.notify(notice, self.sessions.observers)
        self.event_log.flush()

    def collect(self, reason: str, replicas: Iterable[str] = ()) -> str:
        """Asks agents (observers) and the named replicas for evidence; returns the incident's id."""
        names = tuple(replicas)
        incident = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self.event_log.event("collect", f"evidence wanted: {reason}", ", ".join(names))
        targets = self.sessions.observers | set(names or self.sessions.by_replica)
        self.event_log.notify(cluster.CollectEvidence(incident, reason, names), targets)
        self.event_log.flush()
        return incident

    def restart(self, reason: str) -> None:
        """Asks all agents to end their ranks; the launcher starts them again."""
        self.event_log.event("restart", f"restart of the job: {reason}")
        self.event_log.notify(cluster.RestartWanted(reason), self.sessions.observers)
        self.event_log.flush()

    def gather(self, wanted: cluster.CollectEvidence) -> cluster.Gathering:
        """Asks all agents to send the leading one their part of an incident; returns the leader."""
        now = self.now()
        found, new = decide_gathering(now, wanted, self._gathering, self.sessions.observers)
        if wanted.alone and found.lead == wanted.lead:
            self._gathering = Current(found, now)
        if new:
            if not wanted.replicas:  # a comparison of calls is not an event
                self.event_log.event(
                    "collect", f"evidence wanted from {count(len(found.agents), 'agent')}: {wanted.reason}"
                )
            self.event_log.notify(wanted, found.agents)
            self.event_log.flush()
        return found

    @property
    def count(self) -> int:
        return sum(1 for name in self.sessions.observers if name.startswith(cluster.AGENT))

    def report_incident(self, incident: cluster.PublishedIncident) -> None:
        """An agent reports an incident or its outcome; its story is kept for the page."""
        known = next(
            (index for index, one in enumerate(self.incidents) if one.incident == incident.incident), None
        )
        _remember(self.stories, incident.incident, incident.story)
        _remember(self.evidence, incident.incident, incident.evidence)
        at = incident.at or (time.time() if known is None else self.incidents[known].at)
        story = f"/incidents/{incident.incident}" if incident.incident in self.stories else ""
        evidence = f"/incidents/{incident.incident}/evidence" if incident.incident in self.evidence else ""
        kept = replace(incident, at=at, story=story, evidence=evidence)
        new = known is None or self.incidents[known].sentence != kept.sentence
        if known is None:
            self.incidents.append(kept)
        else:
            self.incidents[known] = kept
        if new:
            self.event_log.event("incident", incident.sentence, ", ".join(incident.replicas))


def _remember(texts: dict[str, str], incident: str, text: str) -> None:
    """Keeps the text of an incident; drops the oldest when there are too many or they are too long."""
    if text:
        texts[incident] = text
        while len(texts) > MAX_STORIES or (
            len(texts) > 1 and sum(map(len, texts.values())) > MAX_STORIES_CHARS
        ):
            del texts[next(iter(texts))]
