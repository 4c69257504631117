"""Reads tensors out of a checkpoint, whole or just the chunk a rank needs, and checks every byte it uses.

Which saved chunks make up a wanted chunk is decided by torch.distributed.checkpoint's own resharding, so any
layout loads into any other. Bytes go straight from the disk into the destination where a saved chunk is one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from allranks.checkpoint.layout import Shard
from allranks.checkpoint.manifest import Index, StoredShard
from allranks.checkpoint.opened import Opened, batches
from allranks.checkpoint.plan import TORCH_DTYPES, local_parts
from allranks.checkpoint.state import is_dtensor
from allranks.checkpoint.tensors import memory_of
from allranks.errors import CheckpointDamaged, CheckpointValidationError

#: Neighbouring small shards are fetched together from stores where a read is a request.
BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Target:
    """A chunk to fill: `tensor` is its memory, `offsets` its place in the whole tensor."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class _Fill:
    """A region of a stored shard and the view it belongs into."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    view: torch.Tensor


def threads() -> int:
    """How many threads read at once: reading and hashing both free the GIL."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def targets_of(tensors: Mapping[str, torch.Tensor]) -> list[Target]:
    """The local chunks of live tensors (DTensor, ShardedTensor, plain), as DCP places them."""
    found = []
    for name, tensor in tensors.items():
        for part, offsets in zip(local_parts(tensor), _local_offsets(tensor), strict=True):
            if part.numel() or tensor.numel() == 0:
                found.append(Target(name, part.detach(), offsets))
    return found


def read_whole(checkpoint: Opened, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """New CPU tensors with the whole content of the named ones, in the order asked for."""
    table = checkpoint.table()
    wanted = list(names)
    _require(checkpoint, table, wanted)
    tensors = {name: _empty(table[name][0][1].shard) for name in wanted}
    fill(checkpoint, [Target(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()])
    return tensors


def fill(checkpoint: Opened, targets: Sequence[Target]) -> None:
    """Fills every target; raises CheckpointValidationError if anything is missing or damaged.

    Targets may hold part of the new content when it raises: load something else into them, or stop.
    """
    table = checkpoint.table()
    _require(checkpoint, table, [target.name for target in targets])
    work: dict[StoredShard, tuple[Index, StoredShard, list[_Fill]]] = {}
    for target in targets:
        for index, stored, region in _regions(checkpoint, target, table[target.name]):
            work.setdefault(stored, (index, stored, []))[2].append(region)
    jobs = list(work.values())
    for _, stored, _ in jobs:
        checkpoint.source(stored.file)  # opened and checked here, not in several threads at once
    wide = [job for job in jobs if checkpoint.source(job[1].file).wide_reads]
    narrow = [job for job in jobs if not checkpoint.source(job[1].file).wide_reads]
    if narrow:
        _in_threads(
            threads(), lambda job: _read_one(checkpoint, *job), narrow, lambda job: job[1].shard.bytes
        )
    if wide:
        fills = {stored: regions for _, stored, regions in wide}
        runs = batches([(index, stored) for index, stored, _ in wide], BATCH_BYTES)
        _in_threads(4, lambda run: _read_run(checkpoint, run, fills), runs, lambda run: len(run))


def _in_threads(
    count: int, act: Callable[[Any], None], items: Sequence[Any], weight: Callable[[Any], int]
) -> None:
    """Acts on every item in a few threads that take the heaviest next; raises the first error."""
    left = sorted(items, key=weight)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                item = left.pop()
            except IndexError:
                return
            try:
                act(item)
            except BaseException as error:
                errors.append(error)

    others = [threading.Thread(target=work, name="allranks-read") for _ in range(min(count, len(items)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _read_one(checkpoint: Opened, index: Index, stored: StoredShard, fills: list[_Fill]) -> None:
    direct = _direct_view(stored.shard, fills)
    if direct is not None:
        checkpoint.read_shard(index, stored, direct)
        return
    whole = _empty(stored.shard, stored.shard.sizes)
    checkpoint.read_shard(index, stored, memory_of(whole))
    _scatter(whole, fills)


def _read_run(
    checkpoint: Opened, run: list[tuple[Index, StoredShard]], fills: Mapping[StoredShard, list[_Fill]]
) -> None:
    """Fetches a run of neighbours with few requests, then checks and places each."""
    if len(run) == 1:
        index, stored = run[0]
        _read_one(checkpoint, index, stored, fills[stored])
        return
    first, last = run[0][1], run[-1][1]
    buffer = memoryview(bytearray(last.start + last.shard.bytes - first.start))
    try:
        checkpoint.source(first.file).read_into(first.start, buffer)
    except EOFError as error:
        raise CheckpointDamaged(
            f"{first.file} is cut short: {error}", invalid_keys=(first.file,), path=checkpoint.path
        ) from error
    for index, stored in run:
        at = stored.start - first.start
        piece = buffer[at : at + stored.shard.bytes]
        checkpoint.check(index, stored, piece)
        whole = _empty(stored.shard, stored.shard.sizes)
        memory_of(whole)[:] = piece
        _scatter(whole, fills[stored])


def _scatter(whole: torch.Tensor, fills: list[_Fill]) -> None:
    for region in fills:
        view = whole
        for dim, (offset, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        region.view.copy_(view)


def _direct_view(shard: Shard, fills: list[_Fill]) -> memoryview | None:
    """The destination's own memory, if the whole shard goes into one contiguous place of the same type."""
    if len(fills) != 1 or fills[0].lengths != shard.sizes:
        return None
    view = fills[0].view
    if view.device.type != "cpu" or not view.is_contiguous() or view.dtype != stored_dtype(shard):
        return None
    return memory_of(view)


def _regions(
    checkpoint: Opened, target: Target, stored: list[tuple[Index, StoredShard]]
) -> list[tuple[Index, StoredShard, _Fill]]:
    """The saved regions that make up a target."""
    sizes = tuple(target.tensor.shape)
    for index, one in stored:  # the usual case: saved in the same layout
        if one.shard.offsets == target.offsets and one.shard.sizes == sizes:
            return [(index, one, _Fill((0,) * len(sizes), sizes, target.tensor))]
    shape = stored[0][1].shard.shape
    if len(shape) != len(sizes) or any(
        o + s > w for o, s, w in zip(target.offsets, sizes, shape, strict=True)
    ):
        raise CheckpointValidationError(
            f"{target.name} is saved with shape {shape}, wanted are {sizes} at {target.offsets}",
            invalid_keys=(target.name,), path=checkpoint.path,
        )  # fmt: skip
    chunks = [
        ChunkStorageMetadata(torch.Size(one.shard.offsets), torch.Size(one.shard.sizes)) for _, one in stored
    ]
    saved = TensorStorageMetadata(TensorProperties(dtype=target.tensor.dtype), torch.Size(shape), chunks)
    local = ChunkStorageMetadata(torch.Size(target.offsets), torch.Size(sizes))
    found = []
    by_offsets = {one.shard.offsets: (index, one) for index, one in stored}
    for item in create_read_items_for_chunk_list(target.name, saved, [local]):
        view = target.tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        index, one = by_offsets[tuple(item.storage_index.offset)]
        found.append((index, one, _Fill(tuple(item.storage_offsets), tuple(item.lengths), view)))
    covered = sum(region.view.numel() for _, _, region in found)
    if covered != target.tensor.numel():
        raise CheckpointValidationError(
            f"only {covered} of {target.tensor.numel()} elements of {target.name} are in this checkpoint",
            missing_keys=(target.name,), path=checkpoint.path,
        )  # fmt: skip
    return found


def _require(checkpoint: Opened, table: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = tuple(name for name in names if name not in table)
    if missing:
        raise CheckpointValidationError(
            f"{len(missing)} tensors are not in it", missing_keys=missing[:20], path=checkpoint.path,
            hint=f"allranks checkpoint show '{checkpoint.path}'",
        )  # fmt: skip


def _local_offsets(tensor: Any) -> list[tuple[int, ...]]:
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return [tuple(offsets)]
    if type(tensor).__name__ == "ShardedTensor":
        return [tuple(shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    return [(0,) * tensor.dim()]


def stored_dtype(shard: Shard) -> torch.dtype:
    """The torch dtype of a stored shard."""
    if shard.view:
        found: torch.dtype = getattr(torch, shard.view)
        return found
    return TORCH_DTYPES[shard.dtype]


def _empty(shard: Shard, sizes: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.empty(shard.shape if sizes is None else sizes, dtype=stored_dtype(shard))
