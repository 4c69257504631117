"""torchft's protobuf messages, encoded by hand: four small messages need no generated code. Pure.

Field numbers are torchft's public protocol (package `torchft`, proto3). Unknown fields are ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from allranks.model.cluster import Member, Quorum

_MASK = (1 << 64) - 1
#: QuorumMember: attributes of a Member as fields 1, 2 ..., with their defaults
_MEMBER: dict[str, Any] = {
    "replica": "",
    "address": "",
    "store": "",
    "step": 0,
    "world_size": 0,
    "shrink_only": False,
    "data": "",
    "commit_failures": 0,
}


class BadMessage(ValueError):
    """These bytes are not a message of this protocol."""


def decode_quorum_request(data: bytes) -> Member:
    """LighthouseQuorumRequest{1 requester: QuorumMember}."""
    return decode_member(_first_field(data, "a quorum request without a requester"))


def decode_heartbeat_request(data: bytes) -> str:
    """LighthouseHeartbeatRequest{1 replica_id}."""
    return _first_field(data, "a heartbeat without a replica id").decode("utf-8", "replace")


def _first_field(data: bytes, missing: str) -> bytes:
    found = (value for number, value in fields(data) if number == 1 and isinstance(value, bytes))
    if (value := next(found, None)) is None:
        raise BadMessage(missing)
    return value


def decode_member(data: bytes) -> Member:
    """Ignores a field whose type differs from its attribute's."""
    values, names = dict(_MEMBER), tuple(_MEMBER)
    for number, value in fields(data):
        name = names[number - 1] if 0 < number <= len(names) else ""
        if isinstance(value, int) and isinstance(values.get(name), int):
            values[name] = type(values[name])(signed(value))
        elif isinstance(value, bytes) and isinstance(values.get(name), str):
            values[name] = value.decode("utf-8", "replace")
    return Member(**values, session=values["replica"])


def encode_quorum_response(quorum: Quorum, created_s: float) -> bytes:
    """LighthouseQuorumResponse{1 quorum: Quorum{1 quorum_id, 2 participants, 3 created: Timestamp}}."""
    seconds = int(created_s)
    created = _field(1, seconds) + _field(2, int((created_s - seconds) * 1e9))
    members = b"".join(bytes_field(2, encode_member(member)) for member in quorum.members)
    return bytes_field(1, _field(1, quorum.number) + members + bytes_field(3, created))


def encode_quorum_request(member: Member) -> bytes:
    """LighthouseQuorumRequest{1 requester: QuorumMember}."""
    return bytes_field(1, encode_member(member))


def encode_member(member: Member) -> bytes:
    return b"".join(_field(field, getattr(member, name)) for field, name in enumerate(_MEMBER, 1))


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of every field; checks lengths."""
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
    """Empty for 0 and ""."""
    if not value:
        return b""
    if isinstance(value, str):
        return bytes_field(field, value.encode())
    return _encode_varint(field << 3) + _encode_varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(value)) + value
