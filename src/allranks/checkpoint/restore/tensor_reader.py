"""Reads tensors out of a checkpoint, whole or just the chunks a rank needs, and checks every byte it uses.

First the reading list: which saved bytes make up the tensors a rank wants. Where the layout has changed,
torch.distributed.checkpoint's own resharding decides which saved chunks overlap a wanted one, so any layout loads into any
other.

Everything goes straight into its tensor and is checked while it is in the core's cache.
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
    """A chunk to fill: `tensor` is its memory, `offsets` its place in the whole tensor."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Region(NamedTuple):
    """A region of a stored shard and the view it belongs into."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    view: torch.Tensor


@dataclass(slots=True)
class ReadItem:
    """One stored shard to read. The whole of it goes to `direct`, a contiguous CPU tensor of its type, or else the
    `regions` that are wanted to theirs."""

    index: Index
    stored: StoredShard
    direct: torch.Tensor | None = None
    regions: Sequence[Region] = ()


def targets_of(tensors: Mapping[str, torch.Tensor]) -> list[FillTarget]:
    """The local chunks of tensors (DTensor, ShardedTensor, plain), as DCP places them."""
    found = []
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor and not tensor.requires_grad:  # the usual case, of thousands
            found.append(FillTarget(name, tensor, (0,) * tensor.dim()))
            continue
        for part, offsets in zip(local_parts(tensor), local_offsets(tensor), strict=True):
            if part.numel() or tensor.numel() == 0:
                found.append(FillTarget(name, part.detach(), offsets))
    return found


def new_targets(checkpoint: Opened, names: Iterable[str]) -> list[FillTarget]:
    """New CPU tensors for the whole content of the named ones, in the order asked for."""
    table = checkpoint.table()
    wanted = list(names)
    require(checkpoint, wanted)
    for name in wanted:
        _refuse_gaps(checkpoint, name, table[name])
    tensors = {name: empty_for(table[name][0][1].shard, whole=True) for name in wanted}
    return [FillTarget(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()]


def _refuse_gaps(checkpoint: Opened, name: str, stored: list[tuple[Index, StoredShard]]) -> None:
    """Before memory is taken for a tensor: all of it must be there, and inside its files."""
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
        f"only {there} of {wanted} elements of {name} are in this checkpoint",
        missing_keys=(name,),
        path=checkpoint.path,
    )


def reading_list(checkpoint: Opened, targets: Sequence[FillTarget]) -> list[ReadItem]:
    """Every stored shard the targets need, once, in the order of the files.

    Raises CheckpointValidationError when a tensor is missing, has another shape, or is not there in full.
    """
    require(checkpoint, [target.name for target in targets])
    table = checkpoint.table()
    items: list[ReadItem] = []
    # by the stored shard, which the table holds once: several targets may need parts of it
    cut: dict[int, ReadItem] = {}
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
            f"{len(missing)} tensors are not in it",
            missing_keys=missing[:20],
            path=checkpoint.path,
            hint=f"what is in it: allranks checkpoint show {store_arguments(checkpoint.path, checkpoint.store.spec.options)} --tensors",
        )


def stored_dtype(shard: Shard) -> torch.dtype:
    found = getattr(torch, shard.view, None) if shard.view else TORCH_DTYPES[shard.dtype]
    if not isinstance(found, torch.dtype):
        problem = f"{shard.name} is of type '{shard.view}', which this torch does not know"
        raise CheckpointValidationError(problem, hint="upgrade torch")
    return found


def empty_for(shard: Shard, whole: bool = False) -> torch.Tensor:
    """A new tensor for a shard, or for the whole tensor it is a part of."""
    return torch.empty(shard.shape if whole else shard.sizes, dtype=stored_dtype(shard))


def _regions(
    checkpoint: Opened, target: FillTarget, stored: list[tuple[Index, StoredShard]]
) -> list[tuple[Index, StoredShard, Region | None]]:
    """The saved regions that make up a target; None: a whole shard, which can be read straight into it."""
    tensor = target.tensor
    sizes: tuple[int, ...] = tensor.shape
    for index, one in stored:  # the usual case: saved in the same layout
        if one.shard.offsets == target.offsets and one.shard.sizes == sizes:
            fits = tensor.dtype == stored_dtype(one.shard) and tensor.is_cpu and tensor.is_contiguous()
            fits = fits and not tensor.is_conj() and not tensor.is_neg()
            return [(index, one, None if fits else Region((0,) * len(sizes), sizes, tensor))]
    shape = stored[0][1].shard.shape
    if len(shape) != len(sizes) or any(
        o + s > w for o, s, w in zip(target.offsets, sizes, shape, strict=True)
    ):
        raise CheckpointValidationError(
            f"{target.name} is saved with shape {shape}, wanted are {tuple(sizes)} at {target.offsets}",
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


#: Neighbouring small shards are fetched together from stores where a read is a request.
BATCH_BYTES = 32 << 20
#: What one thread reads in a row at most, so that the kernel reads ahead for it.
ROW_BYTES = 32 << 20
#: Requests for runs of shards under way at once.
RUNS = 4
#: Shards from this size on are read first: one of them at the end would leave the other threads without work.
LARGE_BYTES = 64 << 20
MOST_IN_A_RUN = 512  # a vectored read takes 1024 pieces


def read_whole(checkpoint: Opened, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """New CPU tensors with the whole content of the named ones, in the order asked for."""
    targets = new_targets(checkpoint, names)
    fill(checkpoint, reading_list(checkpoint, targets))
    return {target.name: target.tensor for target in targets}


def fill(checkpoint: Opened, items: Sequence[ReadItem]) -> None:
    """Reads what is on a reading list into its places. Raises CheckpointDamaged if any byte is not what was written."""
    # opened and checked here, not in several threads at once
    far = {file for file in {item.stored.file for item in items} if checkpoint.source(file).wide_reads}
    near = _runs((item for item in items if item.stored.file not in far), TOGETHER_BYTES)
    in_threads(cores(), _rows(near), lambda row: list(map(partial(_read, checkpoint), row)))
    fetched = _runs((item for item in items if item.stored.file in far), BATCH_BYTES)
    in_threads(RUNS, fetched, partial(_read, checkpoint))


def _read(checkpoint: Opened, run: Sequence[ReadItem]) -> None:
    """Reads and checks a run: each shard straight into its place if that is one piece of memory, else by way of a tensor of
    its own."""
    wholes = [empty_for(item.stored.shard) if item.direct is None else item.direct for item in run]
    pairs = list(zip(run, wholes, strict=True))
    checkpoint.read_run([(item.index, item.stored, memory_of(whole)) for item, whole in pairs])
    for item, whole in pairs:
        for region in item.regions:
            region.view.copy_(narrowed(whole, region.offsets, region.lengths))


def _rows(runs: Sequence[list[ReadItem]]) -> list[list[list[ReadItem]]]:
    """Runs in rows, in the order of the files, a few for every thread; the large ones first, each on its own."""
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
    """Neighbouring shards of one file in runs of at most `limit` bytes (one shard may be longer)."""
    runs: list[list[ReadItem]] = []
    file, start, end = "", 0, -1  # of the run that grows
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
