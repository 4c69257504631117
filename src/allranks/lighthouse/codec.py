"""Messages as frames (channel/frames.py): a kind for each type, then JSON. Read and written with msgspec where it is
installed and with the standard library elsewhere (a rank need not have msgspec); both are checked against
the same types.

A connection starts with PREAMBLE, which no HTTP request starts with, so one port can serve both. The high
bit of the kind says that the payload is deflated (large quorums: encoded and packed once, sent to all).
Frames of notices (kinds from FIRST_NOTICE) start with their u64 id, for the acknowledgement.
"""

from __future__ import annotations

import json
import struct
import typing
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

from allranks.channel.frames import HEAD, BadFrame
from allranks.lighthouse import messages
from allranks.model import cluster

try:
    import msgspec

    from allranks.model.parsing import json_decoder
except ImportError:  # a rank without it
    msgspec = None  # type: ignore[assignment]

PREAMBLE = b"ALRK"
_ID = struct.Struct("!Q")
_DEFLATED = 0x80
_DEFLATE_FROM = 4096
FIRST_NOTICE = 64

#: kind byte -> type. Append only.
KINDS: dict[int, type] = dict(
    enumerate(
        (
            messages.Hello, messages.Beat, messages.Join, messages.Withdraw, messages.Leave, messages.Died,
            messages.Ack, messages.Command, messages.Welcome, messages.Refused, messages.NoQuorumYet,
            messages.Pong, messages.Result, cluster.Quorum, messages.Hold, messages.Release, messages.Report,
            messages.Start, messages.Challenge, messages.Proof,
        ),
        start=1,
    )
)  # fmt: skip
KINDS.update(
    enumerate(
        (
            cluster.MemberLost, cluster.MemberLeft, cluster.QuorumWanted, cluster.QuorumFormed,
            cluster.Evicted, cluster.LetIn, cluster.CollectEvidence, cluster.LeaderMoved,
            cluster.ConnectionLost,
        ),
        start=FIRST_NOTICE,
    )
)  # fmt: skip
_KIND_OF = {kind_type: kind for kind, kind_type in KINDS.items()}
BEAT = _KIND_OF[messages.Beat]
ACK = _KIND_OF[messages.Ack]
WELCOME = _KIND_OF[messages.Welcome]
REFUSED = _KIND_OF[messages.Refused]
START, HOLD, RELEASE, REPORT = (
    _KIND_OF[kind] for kind in (messages.Start, messages.Hold, messages.Release, messages.Report)
)
LEAVE = _KIND_OF[messages.Leave]
QUORUM = _KIND_OF[cluster.Quorum]
#: a member is gone: whoever holds sockets of its quorum shuts them
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
