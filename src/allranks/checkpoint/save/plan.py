"""Plans which rank writes which chunk, with the planners of torch.distributed.checkpoint.

DCP's planner finds the chunks that this rank holds (DTensor, FSDP2, tensor parallel, ShardedTensor or plain). Replicated
chunks are distributed over the ranks that share a store. A plan is kept until names, shapes or placements change, so later
saves exchange a few bytes only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import TensorWriteData

from allranks.checkpoint.group import RankGroup
from allranks.checkpoint.manifest import FileLayout, Shard, lay_out, padded
from allranks.checkpoint.tensors import is_dtensor, local_parts

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_ALIGNMENT = 64
_plan_ids = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """One local chunk; `ordinal` counts the local chunks of a tensor."""

    shard: Shard
    dtype: torch.dtype
    ordinal: int

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the chunk among the tensors of a state."""
        return self.shard.name, self.ordinal


@dataclass(frozen=True)
class Placement:
    """A piece and its offset in the arena."""

    piece: Piece
    start: int


@dataclass(frozen=True)
class Plan:
    """The layout of a snapshot. `owned` pieces form the data file; `extra` pieces follow it in memory only."""

    id: int
    fingerprint: str
    layout: FileLayout
    owned: tuple[Placement, ...]
    extra: tuple[Placement, ...]
    arena_bytes: int


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, dtypes, shapes and placements: a plan is valid for tensors of the same fingerprint."""
    parts = []
    for name, tensor in tensors.items():
        where = f"{tensor.device_mesh}{tensor.placements}" if is_dtensor(tensor) else ""
        parts.append(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{where}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def find_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The chunks that this rank holds, from DCP's planner, without empty chunks of non-empty tensors."""
    items = create_default_local_save_plan(dict(tensors), True).items
    seen: dict[str, int] = {}
    pieces = []
    for item in items:
        name, data = item.index.fqn, item.tensor_data
        ordinal = seen.get(name, 0)
        seen[name] = ordinal + 1
        dtype = data.properties.dtype
        if data.chunk.sizes.numel() == 0 and data.size.numel() != 0:
            continue
        pieces.append(Piece(shard_of(name, dtype, data), dtype, ordinal))
    return pieces


_SMALL_BYTES = 64 << 10
#: A piece as sent to the other ranks: name, offsets, sizes, bytes.
Described: TypeAlias = tuple[str, list[int], list[int], int]


def deduplicate(every: Sequence[Sequence[Described]]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """For each rank, the (name, offsets) of the chunks that it writes, given the chunks that each rank holds.

    A chunk on several ranks goes to the one with the least to write so far, large chunks first. Small ones go to the first
    rank: running statistics may differ between ranks, and those of two ranks must not be mixed.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    lengths, known = {}, dict[tuple[str, tuple[int, ...]], list[int]]()
    for rank, entries in enumerate(every):
        for name, offsets, sizes, length in entries:
            chunk = (name, tuple(offsets))
            if known.setdefault(chunk, sizes) != sizes:
                text = f"ranks have different tensors named {name}, of sizes {known[chunk]} and {sizes}: rename one"
                raise ValueError(text)
            holders.setdefault(chunk, []).append(rank)
            lengths[chunk] = length
    loads, owned = [0] * len(every), [set[tuple[str, tuple[int, ...]]]() for _ in every]
    for chunk in sorted(holders, key=lambda chunk: (-lengths[chunk], chunk)):
        small = lengths[chunk] <= _SMALL_BYTES
        rank = holders[chunk][0] if small else min(holders[chunk], key=loads.__getitem__)
        owned[rank].add(chunk)
        loads[rank] += lengths[chunk]
    return owned


def make_plan(
    mark: str, pieces: Sequence[Piece], owned: set[tuple[str, tuple[int, ...]]] | None, keep_all: bool
) -> Plan:
    """Lays out a snapshot. `owned` None: all pieces are owned. `keep_all`: pieces of other ranks are kept in memory."""
    mine = [p for p in pieces if owned is None or (p.shard.name, p.shard.offsets) in owned]
    written = {p.key for p in mine}
    rest = [p for p in pieces if p.key not in written] if keep_all else []
    layout = lay_out([p.shard for p in mine])
    by_shard = {p.shard: p for p in mine}
    placements = tuple(Placement(by_shard[placed.shard], placed.start) for placed in layout.placed)
    start = padded(layout.bytes)
    extra = []
    for piece in rest:
        extra.append(Placement(piece, start))
        start += -(-piece.shard.bytes // _ALIGNMENT) * _ALIGNMENT
    return Plan(next(_plan_ids), mark, layout, placements, tuple(extra), start)


class Planner:
    """Caches the plans of one manager until its tensors change."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._plans: dict[Hashable, Plan] = {}

    def alone(self, mark: str, tensors: Mapping[str, torch.Tensor]) -> Plan:
        """A plan with every local piece, for a snapshot that stays in this process."""
        if mark not in self._plans:
            self._keep(mark, mark, make_plan(mark, find_pieces(tensors), None, True))
        return self._plans[mark]

    def shared(
        self,
        marks: Sequence[str],
        sharers: tuple[int, ...],
        tensors: Mapping[str, torch.Tensor],
        keep_all: bool,
    ) -> Plan:
        """This rank's part of a checkpoint. `marks` are the fingerprints of all ranks; new ones need a collective plan."""
        key = (self.group.world, tuple(marks), sharers, keep_all)
        if key not in self._plans:
            pieces = find_pieces(tensors)
            shards = (piece.shard for piece in pieces)
            every = self.group.gather([(s.name, s.offsets, s.sizes, s.bytes) for s in shards])
            owned = None
            if len(sharers) > 1:
                owned = deduplicate([every[rank] for rank in sharers])[sharers.index(self.group.rank)]
            mark = marks[self.group.rank]
            self._keep(key, mark, make_plan(mark, pieces, owned, keep_all))
        return self._plans[key]

    def _keep(self, key: Hashable, mark: str, plan: Plan) -> None:
        """Stores a plan and drops those for other tensors."""
        self._plans = {k: old for k, old in self._plans.items() if old.fingerprint == mark}
        self._plans[key] = plan


def local_tensors(tensors: Mapping[str, torch.Tensor], plan: Plan) -> list[tuple[torch.Tensor, Placement]]:
    """The live local tensor of every placement of a plan."""
    found = []
    for placement in (*plan.owned, *plan.extra):
        name, ordinal = placement.piece.key
        found.append((local_parts(tensors[name])[ordinal], placement))
    return found


def shard_of(name: str, dtype: torch.dtype, data: TensorWriteData) -> Shard:
    """The Shard for a chunk described by DCP."""
    known = SAFETENSORS_NAMES.get(dtype)
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    return Shard(
        name,
        known or "U8",
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        data.chunk.sizes.numel() * item_bytes,
        "" if known else str(dtype).removeprefix("torch."),
    )
