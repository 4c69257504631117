"""Members, quorums and the notices of a lighthouse; the nodes of a job as reported by agents; its ranks in `allranks status`;
the claims of a manager about its replica.

Every class is a frozen dataclass of plain values, so that a rank without msgspec can encode and decode it with the standard
library. A *replica* holds one whole model (one or more ranks); a *member* is a replica in the current *quorum*; a *session* is
one incarnation of a replica, new after every restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from allranks.model.job_state import StepWork

#: Sent in the hello. Increased with every incompatible change of a message.
PROTOCOL_VERSION = 2

#: Requests for evidence of two agents within this time may be about the same hang.
FOLLOW_S = 120.0


@dataclass(frozen=True)
class Member:
    """What a replica sends when it requests a quorum."""

    replica: str
    session: str = ""
    node: str = ""
    address: str = ""  # of its manager, for healing: "host:port" or a URL; not interpreted
    store: str = ""  # host:port of its TCPStore
    step: int = 0  # last committed step
    world_size: int = 1  # ranks inside the replica
    shrink_only: bool = False  # no new replica may join this quorum
    commit_failures: int = 0  # > 0 requests a new quorum number even if the members are the same
    data: str = ""  # free text, passed to every member
    dialect: str = (
        ""  # format of `data`: a manager's claim (below), torchft's, or ""; the same in a whole quorum
    )


@dataclass(frozen=True)
class Quorum:
    """The replicas that train together. (epoch, number) only increases; with a higher number members reconfigure."""

    number: int
    epoch: int  # leader term of the lighthouse that formed it
    members: tuple[Member, ...]  # sorted by replica; the index is the replica's rank
    reason: str = ""
    round: int = 0  # increases with every answer, so that a missed answer can be sent again
    max_step: int = 0
    reached: int = (
        -1
    )  # the step reached by replicas that are all gone, if the members start before it; else -1
    spares: tuple[str, ...] = ()  # requested too, but not needed; they are notified and wait
    evicted: tuple[str, ...] = ()  # stored by the members for a restarted lighthouse

    @property
    def names(self) -> tuple[str, ...]:
        """The members' replica names, in rank order."""
        return tuple(member.replica for member in self.members)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: a newer quorum has a higher one."""
        return (self.epoch, self.number)

    def rank_of(self, replica: str) -> int | None:
        """The replica's rank, or None if it is not a member."""
        return next((i for i, member in enumerate(self.members) if member.replica == replica), None)

    def member(self, replica: str) -> Member | None:
        return next((member for member in self.members if member.replica == replica), None)


# ---- notices: sent by the lighthouse at least once, acknowledged by the client's thread -----------------


@dataclass(frozen=True)
class MemberLost:
    """A replica died, froze or lost its connection. `certain` is False if it was only silent and may still be running."""

    replica: str
    reason: str
    session: str = ""
    number: int = 0  # the quorum of which it was a member; 0: none
    ms: float = 0.0  # from its last heartbeat to this notice
    certain: bool = True


@dataclass(frozen=True)
class MemberLeft:
    replica: str
    reason: str
    number: int = 0
    term: int = 0  # of the group that committed its last step
    step: int = -1  # step of its state; -1: unknown


@dataclass(frozen=True)
class QuorumWanted:
    """Members should call join() at their next step boundary, because a replica is waiting to join or was lost.

    `broken`: at once, because a member of quorum `number` has given up its group.
    """

    reason: str
    number: int = 0
    broken: bool = False
    waiting: tuple[Member, ...] = ()  # replicas waiting to join, not always complete


@dataclass(frozen=True)
class Probe:
    """Connect to these addresses and report which are reachable. The client does this in parallel with training: a replica
    joins training members only after all have reached each other."""

    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)  # session -> HOST:PORT of its servers


@dataclass(frozen=True)
class Superseded:
    """Another process may own this replica's name, so this one must not commit or save. Created by the client."""

    reason: str


@dataclass(frozen=True)
class QuorumFormed:
    """A quorum with a new number was formed; members get the Quorum as the answer to join()."""

    number: int
    epoch: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Evicted:
    """A replica was evicted, until it is readmitted."""

    replica: str
    reason: str
    number: int = 0


@dataclass(frozen=True)
class LetIn:
    """An evicted replica may join again."""

    replica: str
    reason: str = ""


@dataclass(frozen=True)
class CollectEvidence:
    """Agents should collect stacks and black boxes of these replicas (empty: of all). With `lead`: of these agents.

    With `upload`, each agent sends its part to that address (incidents/peers.py); without, it keeps its part in a folder.
    """

    incident: str
    reason: str
    replicas: tuple[str, ...] = ()
    lead: str = ""  # the agent (or command) that collects the parts
    upload: str = ""  # HOST:PORT of its evidence server
    stacks: bool = True  # False: only black boxes
    alone: bool = True  # an agent that notices the same follows instead of leading, too
    follow_s: float = FOLLOW_S  # a request within this time before is about the same hang


@dataclass(frozen=True)
class RestartWanted:
    """Agents of a whole job should stop their ranks, as requested on the page. The launcher restarts them."""

    reason: str


@dataclass(frozen=True)
class Gathering:
    """The agent that collects the evidence of an incident, and the agents that were asked for their part."""

    incident: str
    lead: str
    agents: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeaderMoved:
    """The client is now connected to another lighthouse. Created by the client."""

    address: str
    reason: str


@dataclass(frozen=True)
class ConnectionLost:
    """No lighthouse is reachable; the client keeps trying. Created by the client."""

    reason: str


Notice = (
    MemberLost
    | MemberLeft
    | QuorumWanted
    | Probe
    | Superseded
    | QuorumFormed
    | Evicted
    | LetIn
    | CollectEvidence
    | RestartWanted
    | LeaderMoved
    | ConnectionLost
)


@dataclass(frozen=True)
class PublishedIncident:
    """A hang or failure, as reported to the lighthouse and shown on its page."""

    incident: str
    sentence: str
    replicas: tuple[str, ...] = ()
    node: str = ""
    path: str = ""  # of the evidence, on the node that collected it
    cause: str = ""
    at: float = 0.0  # when it was opened, Unix time
    kind: str = ""  # stall, hang, death, partition, request
    outcome: str = ""  # the action and its result; "" while open
    decided: str = ""  # the policy's decision if no action was taken
    ranks: tuple[int, ...] = ()  # the guilty ones
    took_s: float = 0.0  # from the first sign to the recovery, or until now
    closed: bool = False
    story: str = ""  # its page: the HTML when published, the address at the lighthouse when shown
    evidence: str = ""  # the same for the stacks and last calls of its ranks, as JSON


SCHEMA = 1
#: The progress of ranks, as seen by their agent. Stalled: none for longer than usual. Hung: none without intervention.
Motion = Literal["moving", "stalled", "hung"]
MOTIONS: tuple[Motion, ...] = ("moving", "stalled", "hung")  # best first
AGENT = "agent-"  # prefix of the names of agents; other observers have no evidence and no node


def write_health(motion: Motion, sentence: str) -> str:
    """The health that an agent reports with its heartbeats: "stalled: rank 0 waits for rank 1"."""
    return sentence if motion == "moving" else f"{motion}: {sentence}"


def read_health(text: str) -> tuple[Motion, str]:
    """(motion, sentence) of a reported health."""
    word, colon, sentence = text.partition(": ")
    motion: Motion = next((one for one in MOTIONS[1:] if colon and one == word), "moving")
    return motion, text if motion == "moving" else sentence


@dataclass(frozen=True)
class Presence:
    """The node of an agent. Ranks die with their agent, so a lost agent is a lost node."""

    agent: str  # its name at the lighthouse
    node: str
    ranks: tuple[int, ...] = ()  # global ranks on that node
    lighthouse: bool = False  # its process includes the lighthouse


@dataclass(frozen=True)
class GpuReport:
    """One GPU of a node, from nvidia-smi."""

    index: int
    busy: int = -1  # percent of the time with a running kernel
    used_mb: int = -1
    total_mb: int = -1
    celsius: int = -1
    watts: int = -1
    pids: tuple[int, ...] = ()  # of processes that use it, if known
    name: str = ""  # "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class NodeReport:
    """The report of an agent about its node, about once a second. Columns have one entry per rank."""

    agent: str = ""
    node: str = ""
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()  # "rollout 1", in a job with several worlds
    pids: tuple[int, ...] = ()
    doing: str = ""  # one letter of DOING for each
    steps: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()  # finished
    step_s: tuple[float, ...] = ()  # seconds per step since the last report; 0: no step
    memory_mb: tuple[int, ...] = ()  # resident
    places: tuple[str, ...] = ()  # the current call; "" for none or unknown
    loss: tuple[float, ...] = ()  # the last loss reported by the script
    work: StepWork = field(default_factory=StepWork)  # of these ranks
    gpus: tuple[GpuReport, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # process groups of these ranks: members
    token_file: str = ""  # path of the job token on this node
    differs: bool = False  # calls differ between these ranks
    windows: dict[str, dict[int, int]] = field(default_factory=dict)  # of calls: group -> window -> hash


@dataclass(frozen=True)
class NodeAnswer:
    """The answer to a NodeReport."""

    every_s: float = 1.0  # interval of reports
    compare: tuple[str, ...] = ()  # agents whose calls the reporter should compare with its own


#: The activity of a rank, as one letter.
DOING = {
    "c": "computes",
    "w": "waits in a call",
    "s": "blocked",
    "h": "heals",
    "e": "exited",
    "d": "died",
    ".": "nothing is known",
}


@dataclass(frozen=True)
class Failover:
    """Prepares for the loss of the lighthouse with its node."""

    host: Presence | None = None  # the node of the lighthouse; None: it runs separately
    successor: str = ""  # the agent that then acts for the others


@dataclass(frozen=True)
class RankRow:
    """The current state of one rank. Ages in seconds; None = never."""

    rank: int
    pid: int
    host: str
    alive: bool
    step: int
    calls_completed: int
    silent_s: float | None  # since the last progress
    doing: str  # "all_reduce #12 of dp_0", "computes", "blocked", "exited", "died"
    waits_for: tuple[int, ...] = ()  # only if it is silent for longer than usual
    steps_per_s: float | None = None
    phase: str = ""
    gpu: str = ""  # "97 %, 61.0 GB" of its GPU, if known
    box: str = ""  # its black box; "" for a rank on another node
    name: str = ""  # "rollout 1" in a job with several worlds
    tokens: float = 0.0  # in its last complete step; 0: unknown


@dataclass(frozen=True)
class JobView:
    job: str
    folder: str
    at: float  # epoch seconds
    rows: tuple[RankRow, ...]
    lighthouse: str = ""
    line: str = ""  # the state line of the job (model/job_state.py)
    level: str = "good"  # good | warn | bad
    state: str = ""  # StateLine.state
    incidents: tuple[str, ...] = ()  # one line each, newest last

    @property
    def running(self) -> bool:
        return any(row.alive for row in self.rows)

    @property
    def still(self) -> bool:
        """Whether the ranks make no progress, according to the detector."""
        return self.state in ("looking", "hung", "stalled")

    def __repr__(self) -> str:
        """Short: the rows of a large job fill a screen."""
        alive = sum(row.alive for row in self.rows)
        return f"<JobView {self.job}: {self.line}; {alive:,} of {len(self.rows):,} ranks run>"

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "running": self.running, **asdict(self)}


# The claim of a manager about its replica, in `Member.data` (manager/plan.py: ReplicaClaim). Only its validity and the
# replica's addresses are checked here.
DIALECT = "manager"  # dialect of members with such a claim
MAX_RANKS = 4096  # per replica
MAX_CHARS = 1 << 20
_MAX_TEXT = 512  # per field
_MAX_LINEAGE = 64
_MAX_NUMBER = 1 << 53  # exact in every JSON reader


def _is_number(value: object) -> bool:
    return type(value) is int and -1 <= value <= _MAX_NUMBER


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT and value.isprintable()


def _is_address(value: object) -> bool:
    if not _is_text(value):
        return False
    host, _, port = str(value).rpartition(":")
    return value == "" or (bool(host) and port.isdigit() and int(port) <= 65535)


def _is_position(value: object) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_number, value))


def _is_lineage(value: object) -> bool:
    return type(value) is list and len(value) <= _MAX_LINEAGE and all(map(_is_position, value))


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        ("term", "step", "seen", "pending", "port", "global_rank", "min_replicas"),
        (_is_number, "a number"),
    ),
    **dict.fromkeys(("torn", "broken", "init_sync", "fixed", "beside", "prepares"), (_is_flag, "a flag")),
    **dict.fromkeys(("prepared", "backend"), (_is_text, "a short text")),
    **dict.fromkeys(("lineage", "arrived_lineage"), (_is_lineage, "a list of [TERM, STEP]")),
    "arrived": (_is_position, "[TERM, STEP]"),
    "address": (_is_address, "HOST:PORT"),
}


def find_fault(text: str) -> str:
    """Why a text is not a valid claim; "" if it is."""
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, but at most {MAX_CHARS} are allowed"
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    ranks = raw.get("ranks") if isinstance(raw, dict) else None
    if not isinstance(ranks, list) or not 0 < len(ranks) <= MAX_RANKS:
        return f"it has no list of 1 to {MAX_RANKS} ranks"
    whole = _find_fault({name: value for name, value in raw.items() if name != "ranks"})
    for number, claim in enumerate(ranks):
        if whole:
            break
        why = _find_fault(claim) if isinstance(claim, dict) else "it is not an object"
        whole = f"rank {number}: {why}" if why else ""
    return whole


def _find_fault(fields: dict[str, Any]) -> str:
    for name, value in fields.items():
        check, what = _KINDS.get(name, (_is_simple, "a number, a flag or a short text"))
        if not check(value):
            return f"{name[:64]!r} is not {what}"
    return ""


def _is_simple(value: object) -> bool:
    """Whether this is a valid value for a field of a newer version."""
    return _is_flag(value) or _is_number(value) or _is_text(value)


def addresses_of(member: Member) -> tuple[str, ...]:
    """The addresses that other members connect to: the servers of its ranks, and its store."""
    found = {member.address: None, member.store: None}
    if member.dialect == DIALECT:
        found |= {str(claim.get("address", "")): None for claim in json.loads(member.data)["ranks"]}
    return tuple(address for address in found if _is_address(address) and address)
