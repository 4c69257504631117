"""Reads and verifies tensors of a checkpoint: whole ones, or the chunks that a rank needs.

`reading_list` determines which saved bytes make up the wanted tensors. If the layout has changed, the resharding of
torch.distributed.checkpoint finds the saved chunks that overlap a wanted one, so any layout loads into any other. `fill`
reads them directly into their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from allranks.checkpoint.checksum import TOGETHER_BYTES, cores, in_threads
from allranks.checkpoint.manifest import Index, Shard, StoredShard
from allranks.checkpoint.restore.opened_checkpoint import Opened
from allranks.checkpoint.save.plan import TORCH_DTYPES
from allranks.checkpoint.stores import store_arguments
from allranks.checkpoint.tensors import local_offsets, local_parts, memory_of, narrowed
from allranks.errors import CheckpointDamaged, CheckpointValidationError


class FillTarget(NamedTuple):
    """A chunk to fill: its memory, and its offsets in the whole tensor."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Region(NamedTuple):
    """A region of a stored shard, and the view to copy it into."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    view: torch.Tensor


@dataclass(slots=True)
class ReadItem:
    """One stored shard to read: as a whole into `direct`, a contiguous CPU tensor, or in parts into `regions`."""

    index: Index
    stored: StoredShard
    direct: torch.Tensor | None = None
    regions: Sequence[Region] = ()


def targets_of(tensors: Mapping[str, torch.Tensor]) -> list[FillTarget]:
    """The local chunks of tensors (DTensor, ShardedTensor, plain), as in DCP."""
    found = []
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor and not tensor.requires_grad:  # fast path: there are thousands
            found.append(FillTarget(name, tensor, (0,) * tensor.dim()))
            continue
        for part, offsets in zip(local_parts(tensor), local_offsets(tensor), strict=True):
            if part.numel() or tensor.numel() == 0:
                found.append(FillTarget(name, part.detach(), offsets))
    return found


def new_targets(checkpoint: Opened, names: Iterable[str]) -> list[FillTarget]:
    """New CPU tensors for the named tensors, in the given order."""
    table = checkpoint.table()
    wanted = list(names)
    require(checkpoint, wanted)
    for name in wanted:
        _refuse_gaps(checkpoint, name, table[name])
    tensors = {name: empty_for(table[name][0][1].shard, whole=True) for name in wanted}
    return [FillTarget(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()]


def _refuse_gaps(checkpoint: Opened, name: str, stored: list[tuple[Index, StoredShard]]) -> None:
    """Raises if the stored shards of a tensor are incomplete, before memory is allocated for it."""
    there, shape = 0, stored[0][1].shard.shape
    for _, one in stored:
        elements = math.prod(one.shard.sizes)
        if one.shard.view and elements * stored_dtype(one.shard).itemsize != one.shard.bytes:
            raise CheckpointDamaged(
                f"{name}: {one.shard.bytes} bytes for {elements} of {one.shard.view}", path=checkpoint.path
            )
        there += elements
    if there < math.prod(shape):
        raise _gaps(checkpoint, name, there, math.prod(shape))


def _gaps(checkpoint: Opened, name: str, there: int, wanted: int) -> CheckpointValidationError:
    return CheckpointValidationError(
        f"the checkpoint has only {there} of {wanted} elements of {name}",
        missing_keys=(name,),
        path=checkpoint.path,
    )


def reading_list(checkpoint: Opened, targets: Sequence[FillTarget]) -> list[ReadItem]:
    """Every stored shard that the targets need, once, in file order.

    Raises CheckpointValidationError if a tensor is missing, incomplete, or has another shape.
    """
    require(checkpoint, [target.name for target in targets])
    table = checkpoint.table()
    items: list[ReadItem] = []
    cut: dict[int, ReadItem] = {}  # by id of the stored shard: several targets may need parts of it
    for target in targets:
        for index, stored, region in _regions(checkpoint, target, table[target.name]):
            if region is None:
                items.append(ReadItem(index, stored, target.tensor))
            else:
                item = cut.setdefault(id(stored), ReadItem(index, stored))
                item.regions = [*item.regions, region]
    items += cut.values()
    return sorted(items, key=lambda item: (item.stored.file, item.stored.start))


def require(checkpoint: Opened, names: Iterable[str]) -> None:
    """Raises CheckpointValidationError unless every named tensor is in the checkpoint."""
    table = checkpoint.table()
    missing = tuple(name for name in names if name not in table)
    if missing:
        raise CheckpointValidationError(
            f"{len(missing)} tensors are missing",
            missing_keys=missing[:20],
            path=checkpoint.path,
            hint=f"list its tensors: allranks checkpoint show {store_arguments(checkpoint.path, checkpoint.store.spec.options)} --tensors",
        )


def stored_dtype(shard: Shard) -> torch.dtype:
    found = getattr(torch, shard.view, None) if shard.view else TORCH_DTYPES[shard.dtype]
    if not isinstance(found, torch.dtype):
        problem = f"{shard.name} has dtype '{shard.view}', which this version of torch lacks"
        raise CheckpointValidationError(problem, hint="upgrade torch")
    return found


def empty_for(shard: Shard, whole: bool = False) -> torch.Tensor:
    """A new tensor for a shard, or for the whole tensor."""
    return torch.empty(shard.shape if whole else shard.sizes, dtype=stored_dtype(shard))


def _regions(
    checkpoint: Opened, target: FillTarget, stored: list[tuple[Index, StoredShard]]
) -> list[tuple[Index, StoredShard, Region | None]]:
    """The saved regions that make up a target; region None: the shard can be read directly into the target."""
    tensor = target.tensor
    sizes: tuple[int, ...] = tensor.shape
    for index, one in stored:  # saved in the same layout, as usual
        if one.shard.offsets == target.offsets and one.shard.sizes == sizes:
            fits = tensor.dtype == stored_dtype(one.shard) and tensor.is_cpu and tensor.is_contiguous()
            fits = fits and not tensor.is_conj() and not tensor.is_neg()
            return [(index, one, None if fits else Region((0,) * len(sizes), sizes, tensor))]
    shape = stored[0][1].shard.shape
    if len(shape) != len(sizes) or any(
        o + s > w for o, s, w in zip(target.offsets, sizes, shape, strict=True)
    ):
        raise CheckpointValidationError(
            f"{target.name} was saved with shape {shape}, but {tuple(sizes)} at {target.offsets} is needed",
            invalid_keys=(target.name,),
            path=checkpoint.path,
        )
    chunks = [
        ChunkStorageMetadata(torch.Size(one.shard.offsets), torch.Size(one.shard.sizes)) for _, one in stored
    ]
    saved = TensorStorageMetadata(TensorProperties(dtype=target.tensor.dtype), torch.Size(shape), chunks)
    local = ChunkStorageMetadata(torch.Size(target.offsets), torch.Size(sizes))
    found: list[tuple[Index, StoredShard, Region | None]] = []
    by_offsets = {one.shard.offsets: (index, one) for index, one in stored}
    for item in create_read_items_for_chunk_list(target.name, saved, [local]):
        view = narrowed(target.tensor, item.dest_offsets, item.lengths)
        index, one = by_offsets[tuple(item.storage_index.offset)]
        found.append((index, one, Region(tuple(item.storage_offsets), tuple(item.lengths), view)))
    covered = sum(region.view.numel() for _, _, region in found if region is not None)
    if covered != target.tensor.numel():
        raise _gaps(checkpoint, target.name, covered, target.tensor.numel())
    return found


BATCH_BYTES = 32 << 20  # adjacent shards fetched with one request
ROW_BYTES = 32 << 20  # read sequentially by one thread, for the kernel's read-ahead
RUNS = 4  # concurrent requests
#: Shards of this size are read first: at the end, one of them would leave the other threads idle.
LARGE_BYTES = 64 << 20
MOST_IN_A_RUN = 512  # a vectored read takes at most 1024 buffers


def read_whole(checkpoint: Opened, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads the named tensors into new CPU tensors."""
    targets = new_targets(checkpoint, names)
    fill(checkpoint, reading_list(checkpoint, targets))
    return {target.name: target.tensor for target in targets}


def fill(checkpoint: Opened, items: Sequence[ReadItem]) -> None:
    """Reads a reading list. Raises CheckpointDamaged if a byte differs from what was written."""
    # opens and checks the files here rather than in several threads
    far = {file for file in {item.stored.file for item in items} if checkpoint.source(file).wide_reads}
    near = _runs((item for item in items if item.stored.file not in far), TOGETHER_BYTES)
    in_threads(cores(), _rows(near), lambda row: list(map(partial(_read, checkpoint), row)))
    fetched = _runs((item for item in items if item.stored.file in far), BATCH_BYTES)
    in_threads(RUNS, fetched, partial(_read, checkpoint))


def _read(checkpoint: Opened, run: Sequence[ReadItem]) -> None:
    """Reads and verifies a run of shards: directly into their target, or through a temporary tensor."""
    wholes = [empty_for(item.stored.shard) if item.direct is None else item.direct for item in run]
    pairs = list(zip(run, wholes, strict=True))
    checkpoint.read_run([(item.index, item.stored, memory_of(whole)) for item, whole in pairs])
    for item, whole in pairs:
        for region in item.regions:
            region.view.copy_(narrowed(whole, region.offsets, region.lengths))


def _rows(runs: Sequence[list[ReadItem]]) -> list[list[list[ReadItem]]]:
    """Groups runs for the threads, a few groups per thread, in file order; large shards come first, each alone."""
    limit = min(ROW_BYTES, sum(map(_length, runs)) // (4 * cores()))
    rows: list[list[list[ReadItem]]] = []
    length = limit
    for run in sorted(runs, key=lambda run: run[0].stored.shard.bytes < LARGE_BYTES):
        if length >= limit:
            rows.append([])
            length = 0
        rows[-1].append(run)
        length += _length(run)
    return rows


def _length(run: Sequence[ReadItem]) -> int:
    first, last = run[0].stored, run[-1].stored
    return last.start + last.shard.bytes - first.start


def _runs(items: Iterable[ReadItem], limit: int) -> list[list[ReadItem]]:
    """Groups adjacent shards of a file into runs of at most `limit` bytes (a single shard may be longer)."""
    runs: list[list[ReadItem]] = []
    file, start, end = "", 0, -1  # of the last run
    for item in items:
        stored = item.stored
        stop = stored.start + stored.shard.bytes
        follows = stored.start == end and stored.file == file
        if follows and stop - start <= limit and len(runs[-1]) < MOST_IN_A_RUN:
            runs[-1].append(item)
        else:
            runs.append([item])
            file, start = stored.file, stored.start
        end = stop
    return runs
