"""torchft's protobuf messages, written and read by hand: four small messages need no generated code. Pure.

Field numbers are torchft's public protocol (package `torchft`, proto3). Unknown fields are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, get_type_hints

from allranks.model.cluster import Member, Quorum

_MASK = (1 << 64) - 1
_MEMBER = "replica address store step world_size shrink_only data commit_failures"  # fields 1, 2 ...
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)
T = TypeVar("T")


class BadMessage(ValueError):
    """Bytes that are no message of this protocol."""


def decode_quorum_request(data: bytes) -> Member:
    """LighthouseQuorumRequest{1 requester: QuorumMember}."""
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            return decode_member(value)
    raise BadMessage("a quorum request without a requester")


def decode_member(data: bytes) -> Member:
    member = read_message(Member, _MEMBER, data)
    return replace(member, session=member.replica)


def decode_heartbeat_request(data: bytes) -> str:
    """LighthouseHeartbeatRequest{1 replica_id}."""
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            return value.decode("utf-8", "replace")
    raise BadMessage("a heartbeat without a replica id")


def encode_quorum_response(quorum: Quorum, created_s: float) -> bytes:
    """LighthouseQuorumResponse{1 quorum: Quorum{1 quorum_id, 2 participants, 3 created: Timestamp}}."""
    seconds = int(created_s)
    created = number_field(1, seconds) + number_field(2, int((created_s - seconds) * 1e9))
    body = number_field(1, quorum.number) + b"".join(bytes_field(2, encode_member(m)) for m in quorum.members)
    return bytes_field(1, body + bytes_field(3, created))


def encode_quorum_request(member: Member) -> bytes:
    """LighthouseQuorumRequest{1 requester: QuorumMember}."""
    return bytes_field(1, encode_member(member))


def encode_member(member: Member) -> bytes:
    return write_message(member, _MEMBER)


def write_message(message: object, names: str) -> bytes:
    """Attributes by name as fields 1, 2 ...; 0 and "" are left out."""
    values = ((field, getattr(message, name)) for field, name in enumerate(names.split(), 1))
    return b"".join(_field(field, value) for field, value in values if value)


def read_message(kind: type[T], names: str, data: bytes) -> T:
    """The other way round. A field of another type than its attribute is passed over."""
    hints, known = _hints(kind), names.split()
    values: dict[str, Any] = {name: hints[name]() for name in known}
    for field, value in fields(data):
        name = known[field - 1] if 0 < field <= len(known) else ""
        hint = hints.get(name)
        if isinstance(value, int) and hint in (int, bool):
            values[name] = bool(value) if hint is bool else signed(value)
        elif isinstance(value, bytes) and hint is str:
            values[name] = value.decode("utf-8", "replace")
    return kind(**values)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of every field; lengths are checked."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value
        elif kind == 2:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise BadMessage("a field is longer than the message")
            yield number, data[position : position + length]
            position += length
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            if size > len(data) - position:
                raise BadMessage("a field is longer than the message")
            yield number, struct.unpack_from("<Q" if kind == 1 else "<I", data, position)[0]
            position += size
        else:
            raise BadMessage(f"unknown wire type {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise BadMessage("a number without an end")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _MASK, position
        shift += 7


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _encode_varint(value: int) -> bytes:
    value &= _MASK
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(field: int, value: int | str) -> bytes:
    if isinstance(value, str):
        return bytes_field(field, value.encode())
    return _encode_varint(field << 3) + _encode_varint(value)


def number_field(field: int, value: int) -> bytes:
    return _field(field, value) if value else b""


def bytes_field(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(value)) + value
