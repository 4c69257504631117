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
_OPTIONAL = int | None
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


def encode_heartbeat_request(replica: str) -> bytes:
    """LighthouseHeartbeatRequest{1 replica_id}."""
    return text_field(1, replica)


def decode_quorum_response(data: bytes) -> tuple[Quorum, float]:
    """The quorum and when it was formed (seconds since 1970)."""
    number, members, created = 0, [], 0.0
    body = next((value for field, value in fields(data) if field == 1 and isinstance(value, bytes)), None)
    if body is None:
        raise BadMessage("a quorum response without a quorum")
    for field, value in fields(body):
        if field == 1 and isinstance(value, int):
            number = signed(value)
        elif field == 2 and isinstance(value, bytes):
            members.append(decode_member(value))
        elif field == 3 and isinstance(value, bytes):
            parts = {key: part for key, part in fields(value) if isinstance(part, int)}
            created = parts.get(1, 0) + parts.get(2, 0) / 1e9
    return Quorum(number, 0, tuple(members)), created


def encode_member(member: Member) -> bytes:
    return write_message(member, _MEMBER)


def write_message(message: object, names: str) -> bytes:
    """Attributes by name as fields 1, 2 ...; 0, "" and None are left out, but for a 0 that may be None."""
    hints, parts = _hints(type(message)), []
    for field, name in enumerate(names.split(), 1):
        value = getattr(message, name)
        if isinstance(value, list):
            parts += [_field(field, each) for each in value]
        elif value or (value is not None and hints[name] == _OPTIONAL):
            parts.append(_field(field, value))
    return b"".join(parts)


def read_message(kind: type[T], names: str, data: bytes) -> T:
    """The other way round. A field of another type than its attribute is passed over."""
    hints, known = _hints(kind), names.split()
    values: dict[str, Any] = {n: None if hints[n] == _OPTIONAL else hints[n]() for n in known}
    for field, value in fields(data):
        name = known[field - 1] if 0 < field <= len(known) else ""
        hint = hints.get(name)
        if isinstance(value, int):
            if hint in (int, bool, _OPTIONAL):
                values[name] = bool(value) if hint is bool else signed(value)
            elif hint == list[int]:
                values[name].append(signed(value))
        elif hint is str:
            values[name] = value.decode("utf-8", "replace")
        elif hint == list[str]:
            values[name].append(value.decode("utf-8", "replace"))
        elif hint == list[int]:  # packed
            position = 0
            while position < len(value):
                number, position = _varint(value, position)
                values[name].append(signed(number))
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


def text_field(field: int, value: str) -> bytes:
    return _field(field, value) if value else b""
