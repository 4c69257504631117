"""Our checkpoints as a storage reader for plain `torch.distributed.checkpoint.load`: verified and resharding.

    dcp.load(state_dict, storage_reader=StorageReader("/nvme/run-1/checkpoint_step_00000500"))

Names are the paths in the state, joined by dots: tensors as in `allranks checkpoint show`, and the plain values around
them (`optimizer_state_dict.param_groups.0.lr`). torch's own HuggingFaceStorageReader reads the tensors of the same
folders, without checking a single byte.
"""

from __future__ import annotations

import dataclasses
import io
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from allranks.checkpoint.restore.into_state import skeletons
from allranks.checkpoint.restore.opened_checkpoint import Opened, opened
from allranks.checkpoint.restore.regions import stored_dtype
from allranks.checkpoint.restore.tensor_reader import read_whole
from allranks.checkpoint.stores.store import StoreSpec, open_store, split_address
from allranks.checkpoint.tensors import array_names, memory_of, tensor_names, unflatten


class StorageReader(DcpStorageReader):
    """Reads one checkpoint by path or URL. `options` are the store's (endpoint, keys …)."""

    def __init__(self, path: str, options: dict[str, str] | None = None) -> None:
        self.path = str(path)
        self.options = dict(options or {})
        self._places: dict[MetadataIndex, Any] = {}
        self._objects: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another checkpoint from now on."""
        if checkpoint_id is not None:
            self.path = str(checkpoint_id)
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP's planners need to know."""
        entries: dict[str, Any] = {}
        with ExitStack() as stack:
            checkpoint = self._open(stack)
            for name, stored in checkpoint.table().items():
                shard = stored[0][1].shard
                chunks = [
                    ChunkStorageMetadata(torch.Size(s.shard.offsets), torch.Size(s.shard.sizes))
                    for _, s in stored
                ]
                entries[name] = TensorStorageMetadata(
                    TensorProperties(dtype=stored_dtype(shard)), torch.Size(shard.shape), chunks
                )
                for index, one in stored:
                    self._places[MetadataIndex(name, one.shard.offsets)] = (index, one)
            self._objects = _objects(checkpoint)
        entries.update({name: BytesStorageMetadata() for name in self._objects})
        return Metadata(entries, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Every rank needs the places, also those that did not read the metadata."""
        if not self._places:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and checks each saved chunk once, and copies the wanted regions out of it."""
        by_chunk: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self._objects[item.storage_index.fqn]))
            else:
                by_chunk.setdefault(dataclasses.replace(item.storage_index, index=None), []).append(item)
        with ExitStack() as stack:
            checkpoint = self._open(stack)
            for place, items in by_chunk.items():
                index, stored = self._places[place]
                whole = torch.empty(stored.shard.sizes, dtype=stored_dtype(stored.shard))
                checkpoint.read_shard(index, stored, memory_of(whole))
                for item in items:
                    view = whole
                    for dim, (offset, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        view = view.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(view)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path or URL may be tried."""
        return True

    def _open(self, stack: ExitStack) -> Any:
        base, name = split_address(self.path)
        store = open_store(StoreSpec(base, self.options))
        stack.callback(store.close)
        return stack.enter_context(opened(store, name))


def _objects(checkpoint: Opened) -> dict[str, Any]:
    """Name → plain value of everything that is not a tensor, as DCP's planner names it."""
    common, _ = skeletons(checkpoint, 0)
    tensors = {name: torch.empty(0) for name in tensor_names(common)}
    tensors.update(read_whole(checkpoint, array_names(common)))
    flat, _ = flatten_state_dict(unflatten(common, tensors))
    return {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}


def _pickled(value: Any) -> io.BytesIO:
    """What DCP's planner wants for a value: torch.save's bytes, made here from plain data, never read from a file."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
