"""The nodes, as their agents tell them: which agent stands for which node, and who gathers evidence. Pure.

All nodes of a job notice the same hang within moments of each other: the first one leads, the others send it their
part and wait. A leader that has gone, or has not asked again for a while, is followed no longer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from allranks.model.cluster import CollectEvidence, Gathering
from allranks.model.nodes import AGENT, Failover, Presence

_REMEMBERED = 256  # lost nodes whose ranks are still known

#: An agent whose line broke by an error, or that is silent, may come back by itself within this time.
CUT_BACK_S, SILENT_BACK_S = 0.4, 5.0


@dataclass
class Nodes:
    """All that was told, by agent."""

    present: dict[str, Presence] = field(default_factory=dict)
    lost: dict[str, Presence] = field(default_factory=dict)  # oldest first

    def note(self, presence: Presence) -> Failover:
        """An agent tells what runs on its node; it learns who would speak if the lighthouse went with its own."""
        self.present[presence.agent] = presence
        host = next((each for each in self.present.values() if each.lighthouse), None)
        rest = [name for name in self.present if host is None or name != host.agent]
        return Failover(host, min(rest, default=""))

    def leave(self, agent: str) -> None:
        """It said good-bye: its node is not lost."""
        self.present.pop(agent, None)

    def lose(self, agent: str, node: str) -> Presence:
        """It is gone; what it has told is kept for those who ask."""
        found = self.present.pop(agent, None) or Presence(agent, node)
        self.lost[agent] = found
        if len(self.lost) > _REMEMBERED:
            del self.lost[next(iter(self.lost))]
        return found

    def find(self, agent: str) -> Presence | None:
        """What is known of a node, present or lost."""
        return self.present.get(agent) or self.lost.get(agent)


@dataclass(frozen=True)
class Current:
    """The last gathering that others follow."""

    gathering: Gathering
    asked_s: float


def decide_gathering(
    now_s: float, wanted: CollectEvidence, current: Current | None, observers: Collection[str]
) -> tuple[Gathering, bool]:
    """The gathering that whoever asks belongs to, and whether agents must be told of it."""
    if (
        wanted.alone
        and current is not None
        and current.gathering.lead != wanted.lead
        and current.gathering.lead in observers
        and now_s - current.asked_s < wanted.follow_s
    ):
        return current.gathering, False
    agents = sorted(name for name in observers if name.startswith(AGENT) and name != wanted.lead)
    return Gathering(wanted.incident, wanted.lead, tuple(agents)), bool(agents)
