"""The nodes of a running job, as agents report them through the lighthouse, and its ranks as `allranks status` shows them.

Pure data; the nodes cross the wire.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1
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
    """For when the lighthouse is lost with its node: which node holds it, and which agent then speaks for the others."""

    host: Presence | None = None  # None: the lighthouse stands alone
    heir: str = ""  # an agent


@dataclass(frozen=True)
class RankRow:
    """One rank now. Ages in seconds; None = never."""

    rank: int
    pid: int
    host: str
    alive: bool
    step: int
    calls_completed: int
    silent_s: float | None  # since the last sign of progress
    doing: str  # "all_reduce #12 of dp_0", "computes", "exited", "died"
    waits_for: tuple[int, ...] = ()
    steps_per_s: float | None = None
    phase: str = ""


@dataclass(frozen=True)
class JobView:
    """One look at a job."""

    job: str
    folder: str
    at: float  # epoch seconds
    rows: tuple[RankRow, ...]
    lighthouse: str = ""
    quorum: str = ""  # the lighthouse's own sentence
    incidents: tuple[str, ...] = ()  # one line each, newest last

    @property
    def running(self) -> bool:
        """Whether any rank runs."""
        return any(row.alive for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `allranks status --json`."""
        return {"schema": SCHEMA, "running": self.running, **asdict(self)}
