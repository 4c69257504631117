"""What the lighthouse shows: a snapshot of everything, and the events of its history. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.model.cluster import Incident, Quorum


@dataclass(frozen=True)
class Event:
    """One thing that happened. `kind`: connected, returned, lost, left, finished, evicted, let_in, quorum,
    waiting, incident, collect, leader, stalled."""

    at: float  # Unix time, for people only
    kind: str
    text: str
    replica: str = ""
    number: int = 0


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica, as the page shows it."""

    replica: str
    session: str
    node: str
    state: str  # member | asking | spare | connected | cooling | evicted | observer | expected | lost | left | finished
    step: int
    progress: int
    idle_s: float
    health: str
    heard_s: float  # seconds since the last sign of life
    address: str
    ranks: int  # connected ranks


@dataclass(frozen=True)
class Status:
    """Everything at one moment. The JSON of `allranks lighthouse status --json`."""

    schema: int
    address: str
    leading: bool
    leader: str
    epoch: int
    number: int
    reason: str  # why there is this quorum, or why there is none yet
    waiting: str  # why no new quorum is formed although somebody asks; ""
    quorum: Quorum | None
    replicas: tuple[ReplicaStatus, ...]
    lost: dict[str, str]  # members of the last quorum that are gone before they had finished -> why
    evicted: dict[str, str]
    history: tuple[Event, ...]
    incidents: tuple[Incident, ...]
    up_s: float
    slept_s: float
    connections: int
    over: bool = False  # the training has ended; who asks now is late
    events: dict[str, int] = field(default_factory=dict)  # how many of each kind since the start
