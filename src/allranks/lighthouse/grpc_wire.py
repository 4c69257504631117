"""torchft's protobuf messages, written and read by hand: four small messages need no generated code. Pure.

Field numbers are torchft's public protocol (package `torchft`, proto3). Unknown fields are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from allranks.model.cluster import Member, Quorum

_MASK = (1 << 64) - 1


class BadMessage(ValueError):
    """Bytes that are no message of this protocol."""


def decode_quorum_request(data: bytes) -> Member:
    """LighthouseQuorumRequest{1 requester: QuorumMember}."""
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            return decode_member(value)
    raise BadMessage("a quorum request without a requester")


def decode_member(data: bytes) -> Member:
    """QuorumMember."""
    text = {1: "", 2: "", 3: "", 7: ""}
    number = {4: 0, 5: 0, 6: 0, 8: 0}
    for field, value in fields(data):
        if field in text and isinstance(value, bytes):
            text[field] = value.decode("utf-8", "replace")
        elif field in number and isinstance(value, int):
            number[field] = value
    return Member(
        replica=text[1],
        session=text[1],
        address=text[2],
        store=text[3],
        data=text[7],
        step=signed(number[4]),
        world_size=number[5],
        shrink_only=bool(number[6]),
        commit_failures=signed(number[8]),
    )


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
    """QuorumMember."""
    return b"".join(
        (
            text_field(1, member.replica),
            text_field(2, member.address),
            text_field(3, member.store),
            number_field(4, member.step),
            number_field(5, member.world_size),
            number_field(6, int(member.shrink_only)),
            text_field(7, member.data),
            number_field(8, member.commit_failures),
        )
    )


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


def number_field(field: int, value: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(value) if value else b""


def bytes_field(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(value)) + value


def text_field(field: int, value: str) -> bytes:
    return bytes_field(field, value.encode()) if value else b""
