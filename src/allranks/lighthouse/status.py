"""The lighthouse's snapshot, its events, and the state that it saves. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.model.cluster import PublishedIncident, Quorum


@dataclass(frozen=True)
class StatusEvent:
    """One thing that happened. `kind`: connected, returned, lost, left, finished, refused, evicted, let_in, quorum,
    waiting, incident, collect, leader, unreachable."""

    at: float  # Unix time, for display only
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
    state: str  # member | asking | spare | unreachable | connected | cooling | evicted | observer | expected | lost | left | finished
    step: int
    progress: int
    idle_s: float
    health: str
    heard_s: float  # seconds since it was last heard
    address: str
    ranks: int  # connected ranks


@dataclass(frozen=True)
class TrainingStatus:
    """What the training does now."""

    sentence: str = ""  # "Training: step 1,650, 6.6 steps/s, 3 of 4 replicas"
    state: str = "warn"  # good | warn | bad: green, amber, red
    step: int = -1
    steps_per_s: float | None = None  # None: not known, or no step is made
    stalled_s: float = 0.0  # since the last step, when that is unusually long
    members: int = 0
    replicas: int = 0  # connected and missing
    word: str = ""  # the state in one word (model/job_state.py: StateLine)
    calls: int = 0  # finished by all ranks, of a script without step marks
    calls_per_s: float | None = None
    tokens_per_s: float | None = None  # None: the script does not report tokens, or no step is made
    mfu: float | None = None  # share of the GPUs' peak; None: operations or peak are not known


@dataclass(frozen=True)
class Departed:
    """A replica that departed and has not returned."""

    replica: str
    kind: str  # lost | left | evicted | finished
    reason: str
    at: float  # Unix time
    step: int = -1  # its last one


@dataclass(frozen=True)
class Status:
    """Everything at one moment. The JSON of `allranks lighthouse status --json`."""

    schema: int
    address: str
    leading: bool
    leader: str
    epoch: int
    number: int
    reason: str  # why this quorum was formed, or why there is none yet
    waiting: str  # why no new quorum is formed although a replica joined; "": none joined
    quorum: Quorum | None
    replicas: tuple[ReplicaStatus, ...]
    lost: dict[str, str]  # members of the last quorum that departed before they finished -> why
    evicted: dict[str, str]
    history: tuple[StatusEvent, ...]
    incidents: tuple[PublishedIncident, ...]
    up_s: float
    slept_s: float
    connections: int
    over: bool = False  # the training has finished; a replica that joins now is late
    events: dict[str, int] = field(default_factory=dict)  # how many of each kind since the start
    job: str = ""
    version: str = ""
    training: TrainingStatus = field(default_factory=TrainingStatus)
    departed: tuple[Departed, ...] = ()


@dataclass(frozen=True)
class PersistedState:
    """What must survive a lighthouse: saved in etcd before it is announced. `number` may be above the quorum's, if it
    was used for a quorum that became void."""

    epoch: int = 0
    number: int = 0
    quorum: Quorum | None = None
    evicted: dict[str, str] = field(default_factory=dict)  # name -> reason
    finished: tuple[str, ...] = ()  # members of the quorum that completed their training
