"""The messages between client and lighthouse, one small frozen dataclass each, and their frames.

A frame (channel/frames.py) has a kind for each type (KINDS), then JSON. msgspec reads and writes it where installed, the
standard library elsewhere (a rank need not have msgspec); both check the same types. New fields need a default; a field
that changes its meaning needs a new PROTOCOL_VERSION.

A connection starts with PREAMBLE, which no HTTP request starts with, so one port can serve both. The high bit of the
kind marks a deflated payload (large quorums: encoded and packed once, sent to all). Frames of notices (kinds from
FIRST_NOTICE) start with their u64 id, for the acknowledgement.
"""

from __future__ import annotations

import json
import struct
import typing
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from allranks.channel.frames import HEAD, BadFrame
from allranks.model import cluster
from allranks.model.cluster import PROTOCOL_VERSION, Member

try:
    import msgspec

    from allranks.model.parsing import json_decoder
except ImportError:  # a rank without it
    msgspec = None  # type: ignore[assignment]

PURPOSE = "lighthouse"  # of the key that client and lighthouse prove to each other


@dataclass(frozen=True)
class Hello:
    """A client's first message, answered by a Challenge. `epoch`, `number` and `round` are of its last quorum."""

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
    proxy: bool = False  # sent by a liveness proxy, which reports its rank's death (Died)
    probes: bool = False  # the client answers a Probe


@dataclass(frozen=True)
class Challenge:
    """Answer to a Hello: asks the client to prove that it knows the job token."""

    nonce: str


@dataclass(frozen=True)
class Proof:
    """The client's proof over the server's nonce and its own Hello; then the lighthouse's, before its Welcome.
    Hexadecimal (channel/keys.py: prove)."""

    proof: str


@dataclass(frozen=True)
class Beat:
    """A heartbeat. An empty payload means: as before."""

    step: int = -1  # -1: not reported
    progress: int = -1
    idle_s: float = 0.0
    health: str = ""
    ping: bool = False  # the client wants a Pong


@dataclass(frozen=True)
class Join:
    """Requests a quorum; answered by a Quorum or a Refused. `known` is the last round that the client received."""

    member: Member
    known: int = 0
    unreached: tuple[str, ...] = ()  # sessions that the client could not connect to
    unserved: tuple[str, ...] = ()  # sessions that it reached, but whose claimed state it could not fetch
    patience_s: float = 0.0  # the client gives up after this; 0: not reported


@dataclass(frozen=True)
class Withdraw:
    """Withdraws a Join; answered by NoQuorumYet."""


@dataclass(frozen=True)
class Leave:
    """The whole replica shuts down cleanly."""

    reason: str = ""
    finished: bool = False  # it completed its training
    term: int = 0  # of the group that committed its last step
    step: int = -1  # steps that its state has; -1: not known


@dataclass(frozen=True)
class Died:
    """A liveness proxy reports that its rank is dead, or `stopped`: then it does not train, but holds its state."""

    reason: str
    stopped: bool = False


@dataclass(frozen=True)
class Ack:
    """The notice of this id has arrived."""

    id: int


@dataclass(frozen=True)
class Probed:
    """Answer to a Probe: sessions that were reached, and those that were not."""

    reached: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class NameLease:
    """Liveness proxy to client only: until then (CLOCK_MONOTONIC of their common machine) no other process can have
    this replica's name."""

    until: float


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
    """The client is admitted. `recall` asks it for its last quorum (as a Quorum frame)."""

    lighthouse: str  # its advertised address
    beat_s: float
    timeout_s: float
    epoch: int
    number: int
    recall: bool = False
    version: int = PROTOCOL_VERSION
    lease_s: float = 0.0  # the client keeps its name for this long after it was last heard; 0: not known


@dataclass(frozen=True)
class Refused:
    """The lighthouse refuses. code: token | version | moved | evicted | superseded | taken | waiting | claim | full |
    draining | garbage | finished. "waiting": another process has the name and may be dead; the client tries again."""

    code: str
    message: str
    leader: str = ""  # moved: the leader's address


@dataclass(frozen=True)
class NoQuorumYet:
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
    """Client to liveness proxy only, first: `link` is ClientOptions as JSON."""

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
    """Client to liveness proxy only: the content of the next heartbeats."""

    step: int = -1
    progress: int = -1
    health: str = ""
    known: tuple[int, ...] = ()  # epoch, number, round of the last quorum


PREAMBLE = b"ALRK"
_ID = struct.Struct("!Q")
_DEFLATED = 0x80
_DEFLATE_FROM = 4096
FIRST_NOTICE = 64

#: kind byte -> type. Append only.
KINDS: dict[int, type] = dict(
    enumerate(
        (
            Hello, Beat, Join, Withdraw, Leave, Died,
            Ack, Command, Welcome, Refused, NoQuorumYet,
            Pong, Result, cluster.Quorum, Hold, Release, Report,
            Start, Challenge, Proof, Probed, NameLease,
        ),
        start=1,
    )
)  # fmt: skip
KINDS.update(
    enumerate(
        (
            cluster.MemberLost, cluster.MemberLeft, cluster.QuorumWanted, cluster.QuorumFormed,
            cluster.Evicted, cluster.LetIn, cluster.CollectEvidence, cluster.LeaderMoved,
            cluster.ConnectionLost, cluster.Probe, cluster.Superseded, cluster.RestartWanted,
        ),
        start=FIRST_NOTICE,
    )
)  # fmt: skip
_KIND_OF = {kind_type: kind for kind, kind_type in KINDS.items()}
BEAT = _KIND_OF[Beat]
ACK = _KIND_OF[Ack]
WELCOME = _KIND_OF[Welcome]
REFUSED = _KIND_OF[Refused]
START, HOLD, RELEASE, REPORT = (_KIND_OF[kind] for kind in (Start, Hold, Release, Report))
LEAVE = _KIND_OF[Leave]
QUORUM = _KIND_OF[cluster.Quorum]
PONG = _KIND_OF[Pong]
PROBE, LEASE = _KIND_OF[cluster.Probe], _KIND_OF[NameLease]
#: a member departed: processes that hold sockets of its quorum shut them down
DEPARTURES = frozenset(_KIND_OF[kind] for kind in (cluster.MemberLost, cluster.MemberLeft, cluster.Evicted))
EMPTY_BEAT = HEAD.pack(0, BEAT)


T = TypeVar("T")


def encode(message: object, notice_id: int = 0) -> bytes:
    """A whole frame. Notices carry their id."""
    kind = _KIND_OF[type(message)]
    payload = _dump(message)
    if len(payload) >= _DEFLATE_FROM:
        payload, kind = zlib.compress(payload, 1), kind | _DEFLATED
    if kind & 0x7F >= FIRST_NOTICE:
        payload = _ID.pack(notice_id) + payload
    return HEAD.pack(len(payload), kind) + payload


def decode(kind: int, payload: bytes | memoryview, limit: int = 64 << 20) -> tuple[object, int]:
    """(message, notice id or 0). Raises BadFrame; never makes more than `limit` bytes of a packed payload."""
    code = kind & 0x7F
    if code not in KINDS:
        raise BadFrame(f"unknown kind {kind}")
    notice_id = 0
    if code >= FIRST_NOTICE:
        if len(payload) < _ID.size:
            raise BadFrame("a notice without an id")
        (notice_id,) = _ID.unpack_from(payload)
        payload = payload[_ID.size :]
    if kind & _DEFLATED:
        payload = _inflate(payload, limit)
    return load(KINDS[code], payload or b"{}"), notice_id


def _inflate(payload: bytes | memoryview, limit: int) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(payload, limit)
    except zlib.error as error:
        raise BadFrame(f"packed payload is damaged: {error}") from error
    if not unpacker.eof:
        raise BadFrame(f"packed payload is cut, or larger than {limit} bytes")
    return data


# ---- JSON <-> dataclasses, with msgspec or without -------------------------------------------------------


def plain_dump(message: object) -> bytes:
    """JSON by the standard library."""
    return json.dumps(asdict(message), separators=(",", ":"), ensure_ascii=False).encode()  # type: ignore[call-overload]


def plain_load(kind: type[T], payload: bytes | memoryview) -> T:
    """Typed JSON by the standard library. Raises BadFrame."""
    try:
        built: T = _build(kind, json.loads(bytes(payload)))
        return built
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFrame(f"{kind.__name__}: {error}") from error


_HINTS: dict[type, dict[str, Any]] = {}


def _build(hint: Any, value: Any) -> Any:
    """`value` as the type `hint` says; TypeError when it is something else."""
    origin = typing.get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        _expect(dict, value)
        hints = _HINTS.get(hint) or _HINTS.setdefault(hint, typing.get_type_hints(hint))
        return hint(**{f.name: _build(hints[f.name], value[f.name]) for f in fields(hint) if f.name in value})
    if origin is tuple:
        _expect(list, value)
        return tuple(_build(typing.get_args(hint)[0], each) for each in value)
    if origin is dict:
        _expect(dict, value)
        return {key: _build(typing.get_args(hint)[1], each) for key, each in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    _expect(hint, value)
    return value


def _expect(kind: type, value: object) -> None:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


_dump: Callable[[object], bytes]
load: Callable[[type[Any], bytes | memoryview], Any]

if msgspec is None:
    _dump, load = plain_dump, plain_load
else:
    _dump = msgspec.json.Encoder().encode

    def load(kind: type[T], payload: bytes | memoryview) -> T:
        """Typed JSON. Raises BadFrame."""
        try:
            return json_decoder(kind).decode(payload)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"{kind.__name__}: {error}") from error
