"""What agents say of their nodes through the lighthouse. Pure data, crosses the wire."""

from __future__ import annotations

from dataclasses import dataclass

AGENT = "agent-"  # how the names of agents begin; other observers have no evidence, and no node


@dataclass(frozen=True)
class Presence:
    """One agent's node: ranks die with their agent, so a lost agent is a lost node."""

    agent: str  # as it is called at the lighthouse
    node: str
    ranks: tuple[int, ...] = ()  # global ranks that run there
    lighthouse: bool = False  # its process holds the lighthouse, which goes with it


@dataclass(frozen=True)
class Failover:
    """For the day when the lighthouse goes with its node: who holds it, and who speaks for those that are left."""

    host: Presence | None = None  # None: the lighthouse stands alone
    heir: str = ""  # an agent
