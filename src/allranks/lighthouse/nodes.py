"""Which agent stands for which node: told by the agents, asked for when one is gone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.model.nodes import Failover, Presence

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
