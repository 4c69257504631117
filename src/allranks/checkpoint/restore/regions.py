"""Which saved bytes make up the tensors a rank wants: the reading list of a load.

Nothing is read here. Where the layout has changed, torch.distributed.checkpoint's own resharding decides which
saved chunks overlap a wanted one, so any layout loads into any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from allranks.checkpoint.layout import Shard
from allranks.checkpoint.manifest import Index, StoredShard
from allranks.checkpoint.restore.opened_checkpoint import Opened
from allranks.checkpoint.save.plan import TORCH_DTYPES
from allranks.checkpoint.stores import store_arguments
from allranks.checkpoint.tensors import local_offsets, local_parts, narrowed
from allranks.errors import CheckpointDamaged, CheckpointValidationError


class FillTarget(NamedTuple):
    """A chunk to fill: `tensor` is its memory, `offsets` its place in the whole tensor.

    A `live` one must not change before everything is known to be right.
    """

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    live: bool = False


class Region(NamedTuple):
    """A region of a stored shard and the view it belongs into."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    view: torch.Tensor


@dataclass(slots=True)
class ReadItem:
    """One stored shard to read, and where its content goes. `live`: some of it into a live target.

    The whole of it goes to `direct`, a contiguous CPU tensor of its type, or else the `regions` that are wanted to
    theirs."""

    index: Index
    stored: StoredShard
    live: bool
    direct: torch.Tensor | None = None
    regions: Sequence[Region] = ()

    def place(self, whole: torch.Tensor) -> None:
        """Copies what is wanted out of the whole shard."""
        if self.direct is not None:
            self.direct.copy_(whole)
        for region in self.regions:
            region.view.copy_(narrowed(whole, region.offsets, region.lengths))


def targets_of(tensors: Mapping[str, torch.Tensor], live: bool) -> list[FillTarget]:
    """The local chunks of tensors (DTensor, ShardedTensor, plain), as DCP places them."""
    found = []
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor and not tensor.requires_grad:  # the usual case, of thousands
            found.append(FillTarget(name, tensor, (0,) * tensor.dim(), live))
            continue
        for part, offsets in zip(local_parts(tensor), local_offsets(tensor), strict=True):
            if part.numel() or tensor.numel() == 0:
                found.append(FillTarget(name, part.detach(), offsets, live))
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
        if one.file.startswith("../") and one.start + one.shard.bytes > checkpoint.source(one.file).bytes:
            raise CheckpointDamaged(f"{one.file} is cut short", invalid_keys=(name,), path=checkpoint.path)
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
        saved = table[target.name]
        whole = _whole(saved, target)
        if whole is not None:
            items.append(whole)
            continue
        for index, stored, region in _regions(checkpoint, target, saved):
            item = cut.get(id(stored))
            if item is None:
                cut[id(stored)] = ReadItem(index, stored, target.live, None, [region])
            else:
                item.regions = [*item.regions, region]
                item.live = item.live or target.live
    items += cut.values()
    return sorted(items, key=lambda item: (item.stored.file, item.stored.start))


def _whole(saved: list[tuple[Index, StoredShard]], target: FillTarget) -> ReadItem | None:
    """The usual case: the chunk was saved as it is wanted, and goes into one piece of memory of the same type."""
    tensor = target.tensor
    for index, stored in saved:
        shard = stored.shard
        if shard.sizes == tensor.shape and shard.offsets == target.offsets:
            fits = tensor.dtype == stored_dtype(shard) and tensor.is_cpu and tensor.is_contiguous()
            return ReadItem(index, stored, target.live, tensor) if fits else None
    return None


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
    """The torch dtype of a stored shard."""
    if shard.view:
        found = getattr(torch, shard.view, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointValidationError(
                f"{shard.name} is of type '{shard.view}', which this torch does not know",
                hint="upgrade torch",
            )
        return found
    return TORCH_DTYPES[shard.dtype]


def empty_for(shard: Shard, whole: bool = False) -> torch.Tensor:
    """A new tensor for a shard, or for the whole tensor it is a part of."""
    return torch.empty(shard.shape if whole else shard.sizes, dtype=stored_dtype(shard))


def _regions(
    checkpoint: Opened, target: FillTarget, stored: list[tuple[Index, StoredShard]]
) -> list[tuple[Index, StoredShard, Region]]:
    """The saved regions that make up a target."""
    sizes: tuple[int, ...] = target.tensor.shape
    for index, one in stored:  # the usual case: saved in the same layout
        if one.shard.offsets == target.offsets and one.shard.sizes == sizes:
            return [(index, one, Region((0,) * len(sizes), sizes, target.tensor))]
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
    found = []
    by_offsets = {one.shard.offsets: (index, one) for index, one in stored}
    for item in create_read_items_for_chunk_list(target.name, saved, [local]):
        view = narrowed(target.tensor, item.dest_offsets, item.lengths)
        index, one = by_offsets[tuple(item.storage_index.offset)]
        found.append((index, one, Region(tuple(item.storage_offsets), tuple(item.lengths), view)))
    covered = sum(region.view.numel() for _, _, region in found)
    if covered != target.tensor.numel():
        raise _gaps(checkpoint, target.name, covered, target.tensor.numel())
    return found
