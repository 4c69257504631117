"""What client and lighthouse say to each other besides notices: one small frozen dataclass per message.

The frame's kind byte tells the type (codec.KINDS). Fields may be added with a default; a field that changes
its meaning raises PROTOCOL_VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.model.cluster import PROTOCOL_VERSION, Member

PURPOSE = "lighthouse"  # names the key that client and lighthouse prove to know


@dataclass(frozen=True)
class Hello:
    """First message of a client, answered by a Challenge. `epoch` and `number` are of the last quorum it was in."""

    nonce: str = ""  # hexadecimal, new for each connection
    version: int = PROTOCOL_VERSION
    role: str = "replica"  # replica | observer
    replica: str = ""
    session: str = ""
    node: str = ""
    rank: int = 0  # inside the replica
    connections: int = 1  # how many ranks of the replica connect
    epoch: int = 0
    number: int = 0
    round: int = 0
    pid: int = 0
    proxy: bool = False  # a liveness proxy speaks, which says so (Died) when its rank is dead


@dataclass(frozen=True)
class Challenge:
    """Answer to a Hello: prove that you know the job token."""

    nonce: str


@dataclass(frozen=True)
class Proof:
    """Of the client over the server's nonce and its own Hello; then of the lighthouse, which welcomes it.
    Hexadecimal (channel/keys.py: prove)."""

    proof: str


@dataclass(frozen=True)
class Beat:
    """Alive. An empty payload means: as before."""

    step: int = -1  # -1: not said
    progress: int = -1
    idle_s: float = 0.0
    health: str = ""
    ping: bool = False  # the client wants a Pong


@dataclass(frozen=True)
class Join:
    """Asks for a quorum; answered by a Quorum, or a Refused. `known` is the last round that it has received."""

    member: Member
    known: int = 0


@dataclass(frozen=True)
class Withdraw:
    """Asks no more; answered by NoQuorumYet."""


@dataclass(frozen=True)
class Leave:
    """Good-bye of the whole replica."""

    reason: str = ""
    finished: bool = False  # its training is over: it was not only told to go
    term: int = 0  # of the group that committed its last step
    step: int = -1  # steps that its state has; -1: not known


@dataclass(frozen=True)
class Died:
    """Said by the liveness proxy of a rank that is dead."""

    reason: str


@dataclass(frozen=True)
class Ack:
    """The notice of this id has arrived."""

    id: int


@dataclass(frozen=True)
class Command:
    """An action: status, evict, let_in, finish, collect, gather, accuse, incident, present, presence. Answered by
    Result."""

    id: int
    action: str
    replica: str = ""
    reason: str = ""
    replicas: tuple[str, ...] = ()
    body: str = ""  # JSON


@dataclass(frozen=True)
class Welcome:
    """The client is in. `recall`: please send the last quorum you were in (as a Quorum frame)."""

    lighthouse: str  # its address, as it tells others
    beat_s: float
    timeout_s: float
    epoch: int
    number: int
    recall: bool = False
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Refused:
    """No. code: token | version | moved | evicted | superseded | full | draining | garbage | finished."""

    code: str
    message: str
    leader: str = ""  # moved: where to go


@dataclass(frozen=True)
class NoQuorumYet:
    """Why there is no quorum yet."""

    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pong:
    """The lighthouse is alive."""


@dataclass(frozen=True)
class Result:
    """Answer to a Command. `body` is JSON; `ok` False: body is a sentence."""

    id: int
    ok: bool
    body: str = ""


@dataclass(frozen=True)
class Start:
    """Client to liveness proxy only, first: `link` is LinkOptions as JSON."""

    link: str
    pid: int
    black_box: str = ""


@dataclass(frozen=True)
class Hold:
    """Client to liveness proxy only: `count` file descriptors sent along belong to the groups of this quorum."""

    number: int
    count: int


@dataclass(frozen=True)
class Release:
    """Client to liveness proxy only: close the descriptors held for this quorum."""

    number: int


@dataclass(frozen=True)
class Report:
    """Client to liveness proxy only: what the next heartbeats should say."""

    step: int = -1
    progress: int = -1
    health: str = ""
    known: tuple[int, ...] = ()  # epoch, number, round of the last quorum
