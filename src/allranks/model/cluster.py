"""Who trains together: members, quorums, and the notices that a lighthouse pushes; the nodes of a job, as agents report them;
its ranks as `allranks status` shows them; what a manager may claim of its replica. Pure data; all but the ranks crosses the wire.

Every class here is a frozen dataclass of plain values, so that a rank without msgspec can read and write it
with the standard library. Words: a *replica* holds one whole model (one or more ranks); a *member* is a
replica inside the current *quorum*; a *session* is one incarnation of a replica, new at every restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from allranks.model.job_state import StepWork

#: Spoken in the hello. Raised when a message changes in a way that an older peer would misread.
PROTOCOL_VERSION = 2

#: How long after one agent's asking another's may be about the same hang.
FOLLOW_S = 120.0


@dataclass(frozen=True)
class Member:
    """What a replica says of itself when it asks for a quorum."""

    replica: str
    session: str = ""
    node: str = ""
    address: str = ""  # where others reach its manager (healing), "host:port" or a URL; free text to us
    store: str = ""  # host:port of its TCPStore
    step: int = 0  # last committed step
    world_size: int = 1  # ranks inside the replica
    shrink_only: bool = False  # nobody new may come in with this quorum
    commit_failures: int = 0  # > 0 asks for a new quorum number even if nobody came or went
    data: str = ""  # free text of the caller, handed to every member
    #: what `data` is: a manager's claim (below), torchft's, or ""; one for all of a quorum
    dialect: str = ""


@dataclass(frozen=True)
class Quorum:
    """Who trains together now. (epoch, number) only ever grows; a higher number means: reconfigure."""

    number: int
    epoch: int  # leader term of the lighthouse that formed it
    members: tuple[Member, ...]  # sorted by replica; the index is the replica's rank
    reason: str = ""
    #: grows with every answer, also while the number stays: who missed an answer is sent it again
    round: int = 0
    max_step: int = 0
    #: the step that the training had come to, where all who held it are gone and the members begin before it; else -1
    reached: int = -1
    spares: tuple[str, ...] = ()  # asked too, but left over; they are notified and wait
    evicted: tuple[str, ...] = ()  # kept by the members, so that a restarted lighthouse still knows

    @property
    def names(self) -> tuple[str, ...]:
        """The members' replica names, in rank order."""
        return tuple(member.replica for member in self.members)

    @property
    def order(self) -> tuple[int, int]:
        """Compare this to tell which of two quorums is newer."""
        return (self.epoch, self.number)

    def rank_of(self, replica: str) -> int | None:
        """The replica's rank, or None when it is not a member."""
        return next((i for i, member in enumerate(self.members) if member.replica == replica), None)

    def member(self, replica: str) -> Member | None:
        return next((member for member in self.members if member.replica == replica), None)


# ---- notices: pushed by the lighthouse, at least once, acknowledged by the client's thread --------------


@dataclass(frozen=True)
class MemberLost:
    """A replica died, froze or was cut off. `certain` is False when it was only silent (it may still run)."""

    replica: str
    reason: str
    session: str = ""
    number: int = 0  # quorum in which it was a member; 0: in none
    ms: float = 0.0  # from the last sign of life to this notice
    certain: bool = True


@dataclass(frozen=True)
class MemberLeft:
    replica: str
    reason: str
    number: int = 0
    term: int = 0  # of the group that committed its last step
    step: int = -1  # steps that its state has; -1: not known


@dataclass(frozen=True)
class QuorumWanted:
    """Members should call join() at their next step boundary: somebody waits to come in, or one was lost.

    `broken`: at once, for a member of quorum `number` has given its group up and asks again.
    """

    reason: str
    number: int = 0
    broken: bool = False
    waiting: tuple[Member, ...] = ()  # who waits to join, as far as it is worth naming


@dataclass(frozen=True)
class Probe:
    """Connect to these addresses and report whether each could be reached. The client's connection does it by itself,
    beside the training: nobody joins members that train before all have reached each other."""

    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)  # session -> HOST:PORT of its servers


@dataclass(frozen=True)
class Superseded:
    """Another process owns this replica's name, or may: this one must not commit or save. Made by the client itself."""

    reason: str


@dataclass(frozen=True)
class QuorumFormed:
    """A quorum with a new number was formed; members get the whole Quorum as the answer to join()."""

    number: int
    epoch: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Evicted:
    """A replica was thrown out and stays out until it is let in again."""

    replica: str
    reason: str
    number: int = 0


@dataclass(frozen=True)
class LetIn:
    """An evicted replica may come back."""

    replica: str
    reason: str = ""


@dataclass(frozen=True)
class CollectEvidence:
    """Agents should gather stacks and black boxes of the named replicas (none named: of all). With `lead`: the agents that are asked.

    With `upload` each agent sends its part there (incidents/peers.py); without, it keeps it in a folder of its own.
    """

    incident: str
    reason: str
    replicas: tuple[str, ...] = ()
    lead: str = ""  # the agent (or command) that gathers the parts
    upload: str = ""  # HOST:PORT of its evidence server
    stacks: bool = True  # False: black boxes are enough
    alone: bool = True  # another agent that notices the same meanwhile follows instead of leading too
    follow_s: float = FOLLOW_S  # a leader that asked within this time before has noticed the same


@dataclass(frozen=True)
class RestartWanted:
    """Agents of a whole job should end their ranks: somebody asked for it on the page. The launcher starts them again."""

    reason: str


@dataclass(frozen=True)
class Gathering:
    """Who gathers the evidence of an incident, and which agents were asked for their part."""

    incident: str
    lead: str
    agents: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeaderMoved:
    """The connection now goes to another lighthouse. Made by the client itself."""

    address: str
    reason: str


@dataclass(frozen=True)
class ConnectionLost:
    """No lighthouse can be reached just now; the client keeps trying. Made by the client itself."""

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
    path: str = ""  # where the evidence lies, on the node that found it
    cause: str = ""
    at: float = 0.0  # when it was opened, Unix time
    kind: str = ""  # stall, hang, death, partition, request
    outcome: str = ""  # what was done and how it ended; "" while open
    decided: str = ""  # what the policy decided where nothing was done
    ranks: tuple[int, ...] = ()  # the guilty ones
    took_s: float = 0.0  # from the first sign to the recovery, or until now
    closed: bool = False
    story: str = ""  # its page as HTML when it is published; where the lighthouse serves it when it is shown
    evidence: str = ""  # the same for the stacks and last calls of its ranks, as JSON


SCHEMA = 1
#: What an agent sees its ranks do. Stalled: none has moved for longer than usual. Hung: they will not move by themselves.
Motion = Literal["moving", "stalled", "hung"]
MOTIONS: tuple[Motion, ...] = ("moving", "stalled", "hung")  # the better first
AGENT = "agent-"  # how the names of agents begin; other observers have no evidence, and no node


def write_health(motion: Motion, sentence: str) -> str:
    """What an agent reports with its heartbeats: "stalled: rank 0 waits for rank 1"."""
    return sentence if motion == "moving" else f"{motion}: {sentence}"


def read_health(text: str) -> tuple[Motion, str]:
    """The motion and the sentence of a reported health."""
    word, colon, sentence = text.partition(": ")
    motion: Motion = next((one for one in MOTIONS[1:] if colon and one == word), "moving")
    return motion, text if motion == "moving" else sentence


@dataclass(frozen=True)
class Presence:
    """One agent's node: ranks die with their agent, so a lost agent is a lost node."""

    agent: str  # as it is called at the lighthouse
    node: str
    ranks: tuple[int, ...] = ()  # global ranks that run there
    lighthouse: bool = False  # its process holds the lighthouse, which goes with it


@dataclass(frozen=True)
class GpuReport:
    """One GPU of a node, from nvidia-smi."""

    index: int
    busy: int = -1  # percent of the time that a kernel ran
    used_mb: int = -1
    total_mb: int = -1
    celsius: int = -1
    watts: int = -1
    pids: tuple[int, ...] = ()  # of processes that use it, where that can be told
    name: str = ""  # "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class NodeReport:
    """What an agent sees of its node, about once a second. Columns have one entry per rank."""

    agent: str = ""
    node: str = ""
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()  # "rollout 1", in a job of several worlds
    pids: tuple[int, ...] = ()
    doing: str = ""  # one letter of DOING for each
    steps: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()  # finished
    step_s: tuple[float, ...] = ()  # seconds per step since the last report; 0: none was made
    memory_mb: tuple[int, ...] = ()  # resident
    places: tuple[str, ...] = ()  # the call that it is in, "" when in none or not read
    loss: tuple[float, ...] = ()  # the newest that the script has given, if it does
    work: StepWork = field(default_factory=StepWork)  # of these ranks
    gpus: tuple[GpuReport, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)  # process groups of these ranks: members
    token_file: str = ""  # where the job token is, on this node
    differs: bool = False  # calls of these ranks differ among themselves
    # of calls (watch/calls.py): group -> window -> hash
    windows: dict[str, dict[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeAnswer:
    """To a report."""

    every_s: float = 1.0  # until the next one is wanted
    compare: tuple[str, ...] = ()  # agents whose ranks' calls the reporter should compare with its own


#: What a rank does, as one letter.
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
    """For when the lighthouse is lost with its node: which node holds it, and which agent then speaks for the others."""

    host: Presence | None = None  # None: the lighthouse stands alone
    successor: str = ""  # an agent


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
    doing: str  # "all_reduce #12 of dp_0", "computes", "blocked", "exited", "died"
    waits_for: tuple[int, ...] = ()  # only when it is silent for longer than is usual
    steps_per_s: float | None = None
    phase: str = ""
    gpu: str = ""  # "97 %, 61.0 GB" of the GPU that it uses, where that is known
    box: str = ""  # its black box; "" of a rank of another node
    name: str = ""  # "rollout 1" in a job of several worlds
    tokens: float = 0.0  # of its last whole step; 0: not given


@dataclass(frozen=True)
class JobView:
    job: str
    folder: str
    at: float  # epoch seconds
    rows: tuple[RankRow, ...]
    lighthouse: str = ""
    line: str = ""  # the state of the job in words (model/job_state.py), the same as on its page
    level: str = "good"  # good | warn | bad
    state: str = ""  # in one word
    incidents: tuple[str, ...] = ()  # one line each, newest last

    @property
    def running(self) -> bool:
        return any(row.alive for row in self.rows)

    @property
    def still(self) -> bool:
        """Whether the detector says that the ranks do not move."""
        return self.state in ("looking", "hung", "stalled")

    def __repr__(self) -> str:
        """Short: the rows of a large job fill a screen."""
        alive = sum(row.alive for row in self.rows)
        return f"<JobView {self.job}: {self.line}; {alive:,} of {len(self.rows):,} ranks run>"

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "running": self.running, **asdict(self)}


# What a rank's manager says of its state, in the free text of a member (manager/plan.py: ReplicaClaim), as far as others must
# understand it: whether it is well formed, and where the replica listens.
DIALECT = "manager"  # of members whose text is a claim
MAX_RANKS = 4096  # of one replica
MAX_CHARS = 1 << 20
_MAX_TEXT = 512  # of one field
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
    """Why this text is not a claim that every member can read; "" when it is one."""
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
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
    """Of a field of a newer version."""
    return _is_flag(value) or _is_number(value) or _is_text(value)


def addresses_of(member: Member) -> tuple[str, ...]:
    """Where the other members will connect to it: the servers of its ranks, and its store."""
    found = {member.address: None, member.store: None}
    if member.dialect == DIALECT:
        found |= {str(claim.get("address", "")): None for claim in json.loads(member.data)["ranks"]}
    return tuple(address for address in found if _is_address(address) and address)
