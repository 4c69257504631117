"""The messages of torchft's ManagerService, written and read by hand. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.lighthouse.grpc_wire import bytes_field, fields, number_field, signed, text_field
from allranks.torchft.quorum_results import QuorumResult


@dataclass(frozen=True)
class QuorumRequest:
    """ManagerQuorumRequest."""

    group_rank: int
    step: int
    checkpoint_metadata: str = ""
    shrink_only: bool = False
    init_sync: bool = False
    commit_failures: int = 0


def encode_request(request: QuorumRequest) -> bytes:
    return b"".join(
        (
            number_field(1, request.group_rank), number_field(2, request.step),
            text_field(3, request.checkpoint_metadata), number_field(4, int(request.shrink_only)),
            number_field(5, int(request.init_sync)), number_field(6, request.commit_failures),
        )
    )  # fmt: skip


def decode_request(data: bytes) -> QuorumRequest:
    numbers, texts = read(data)
    return QuorumRequest(
        numbers.get(1, 0), numbers.get(2, 0), texts.get(3, ""), bool(numbers.get(4)), bool(numbers.get(5)),
        numbers.get(6, 0),
    )  # fmt: skip


def encode_result(result: QuorumResult) -> bytes:
    """ManagerQuorumResponse."""
    return b"".join(
        (
            number_field(1, result.quorum_id),
            text_field(2, result.recover_src_manager_address),
            _optional(3, result.recover_src_replica_rank),
            _packed(4, result.recover_dst_replica_ranks),
            text_field(5, result.store_address),
            number_field(6, result.max_step),
            _optional(7, result.max_replica_rank),
            number_field(8, result.max_world_size),
            number_field(9, result.replica_rank),
            number_field(10, result.replica_world_size),
            number_field(11, int(result.heal)),
            number_field(12, result.commit_failures),
            *(bytes_field(13, name.encode()) for name in result.replica_ids),
        )
    )


def decode_result(data: bytes) -> QuorumResult:
    numbers, texts = read(data)
    destinations: list[int] = []
    names: list[str] = []
    for field, value in fields(data):
        if field == 4:
            destinations += _unpacked(value) if isinstance(value, bytes) else [signed(value)]
        elif field == 13 and isinstance(value, bytes):
            names.append(value.decode("utf-8", "replace"))
    return QuorumResult(
        quorum_id=numbers.get(1, 0),
        replica_rank=numbers.get(9, 0),
        replica_world_size=numbers.get(10, 0),
        store_address=texts.get(5, ""),
        max_step=numbers.get(6, 0),
        max_replica_rank=numbers.get(7),
        max_world_size=numbers.get(8, 0),
        heal=bool(numbers.get(11)),
        recover_src_manager_address=texts.get(2, ""),
        recover_src_replica_rank=numbers.get(3),
        recover_dst_replica_ranks=destinations,
        commit_failures=numbers.get(12, 0),
        replica_ids=names,
    )


def read(data: bytes) -> tuple[dict[int, int], dict[int, str]]:
    """The last number and the last text of every field."""
    numbers: dict[int, int] = {}
    texts: dict[int, str] = {}
    for field, value in fields(data):
        if isinstance(value, int):
            numbers[field] = signed(value)
        else:
            texts[field] = value.decode("utf-8", "replace")
    return numbers, texts


def _optional(field: int, value: int | None) -> bytes:
    """A number that may be 0 and still be there."""
    if value is None:
        return b""
    return number_field(field, value) or bytes(((field << 3), 0))


def _packed(field: int, values: list[int]) -> bytes:
    return b"".join(_optional(field, value) for value in values)


def _unpacked(data: bytes) -> list[int]:
    values, current, shift = [], 0, 0
    for byte in data:
        current |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(signed(current))
            current = shift = 0
    return values
