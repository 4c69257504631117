"""Our format as a storage writer for plain `torch.distributed.checkpoint.save` (and `async_save`).

    dcp.save(state_dict, storage_writer=StorageWriter("/nvme/run-1/checkpoint_step_00000500"))

Every rank writes one data file and one index, checksummed on the way; the coordinator commits them with the manifest:
a save that fails leaves nothing that looks like a checkpoint. No pickle: what is neither a tensor nor plain data is
refused with its path. `StorageReader`, `load_checkpoint(path)` and `allranks checkpoint` read what comes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from allranks.checkpoint.checksum import best_algorithm, checksum
from allranks.checkpoint.layout import FileLayout, Shard, lay_out
from allranks.checkpoint.manifest import (
    DataFile,
    Index,
    StoredShard,
    encode_index,
    encode_manifest,
    part_name,
)
from allranks.checkpoint.save.plan import shard_of
from allranks.checkpoint.save.writer import SaveJob, collect, part_of
from allranks.checkpoint.stores.store import (
    Attempt,
    Store,
    StoreSpec,
    open_store,
    split_address,
    step_in_name,
)
from allranks.checkpoint.tensors import flatten, memory_of


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What the coordinator tells each rank: who it is in this save, with whom, and the attempt's token."""

    rank: int
    ranks: tuple[int, ...]
    token: str


class StorageWriter(DcpStorageWriter):
    """Writes one checkpoint to STORE/NAME, a path or URL; the step is the number in NAME unless given."""

    def __init__(self, path: str, options: Mapping[str, str] | None = None, step: int | None = None) -> None:
        self.path = str(path)
        self.options = dict(options or {})
        self.step = step

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another checkpoint from now on."""
        if checkpoint_id is not None:
            self.path = str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: places are made by the first write."""

    def storage_meta(self) -> StorageMeta:
        """Where it goes."""
        return StorageMeta(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: one attempt for all."""
        token, ranks = secrets.token_hex(6), tuple(range(len(plans)))
        return [
            dataclasses.replace(plan, storage_data=Ticket(rank, ranks, token))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file and index; both durable when it returns."""
        self._ticket: Ticket = plan.storage_data
        objects = {item.index.fqn: _object(item, planner) for item in plan.items if _is_object(item)}
        tensors = [
            (shard_of(item.index.fqn, item.tensor_data.properties.dtype, item.tensor_data), _tensor(item, planner))
            for item in plan.items
            if not _is_object(item)
        ]  # fmt: skip
        for name, value in objects.items():
            tensors += [(_whole(key, t), t) for key, t in flatten(value, prefix=name).tensors.items()]
        with self._open() as (store, name):
            attempt = Attempt(name, self._ticket.token)
            self._write(store, attempt, [pair for pair in tensors if pair[0].bytes or 0 in pair[0].shape])
        results = [
            WriteResult(item.index, 0 if _is_object(item) else item.tensor_storage_size() or 0, objects.get(item.index.fqn))
            for item in plan.items
        ]  # fmt: skip
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: the nested state into its index, then the manifest."""
        ticket = self._ticket
        with self._open() as (store, name):
            step = self.step if self.step is not None else step_in_name(name) or 0
            job = SaveJob(
                StoreSpec("", {}), Attempt(name, ticket.token), ticket.rank, ticket.ranks, len(ticket.ranks), step, 0,
                time.time(), best_algorithm(),
            )  # fmt: skip
            self._write_index(
                store, job.attempt, dataclasses.replace(self._index, common=_common(metadata, results, step))
            )
            mine = part_of(job, ticket.rank, store)
            assert mine is not None
            store.commit(job.attempt, encode_manifest(collect(job, mine, store, lambda: True)))
            store.leave(job.attempt)
            store.tidy()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path or URL may be tried."""
        return True

    def _write(self, store: Store, attempt: Attempt, tensors: list[tuple[Shard, torch.Tensor]]) -> None:
        layout = lay_out([shard for shard, _ in tensors])
        by_shard, sums = dict(tensors), dict[str, str]()
        data_name = self._name(store, "safetensors")
        store.write(attempt, data_name, _pieces(layout, by_shard, sums), layout.bytes)
        algorithm = best_algorithm()
        file = DataFile(data_name, layout.bytes, len(layout.header), checksum(layout.header, algorithm))
        stored = tuple(StoredShard(p.shard, data_name, p.start, sums[p.key]) for p in layout.placed)
        self._index = Index(self._ticket.rank, algorithm, (file,), stored)
        if self._ticket.rank != self._ticket.ranks[0]:
            self._write_index(store, attempt, self._index)

    def _write_index(self, store: Store, attempt: Attempt, index: Index) -> None:
        data = encode_index(index)
        store.write(attempt, self._name(store, "json"), [memoryview(data)], len(data))

    def _name(self, store: Store, suffix: str) -> str:
        return part_name(self._ticket.rank, suffix, self._ticket.token if store.attempt_in_names else "")

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Store, str]]:
        base, name = split_address(self.path)
        store = open_store(StoreSpec(base, self.options))
        try:
            yield store, name
        finally:
            store.close()


def _is_object(item: WriteItem) -> bool:
    return bool(item.type == WriteItemType.BYTE_IO)


def _object(item: WriteItem, planner: Any) -> Any:
    """The plain value itself; a planner that only gives bytes has pickled it, which is undone without running code."""
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return torch.load(data, weights_only=True)


def _tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    return data.detach()


def _whole(name: str, tensor: torch.Tensor) -> Shard:
    chunk = ChunkStorageMetadata(torch.Size((0,) * tensor.dim()), tensor.shape)
    return shard_of(
        name, tensor.dtype, TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
    )


def _pieces(
    layout: FileLayout, tensors: Mapping[Shard, torch.Tensor], sums: dict[str, str]
) -> Iterator[memoryview]:
    """The file's bytes, one tensor after the other; each is hashed when its turn comes."""
    yield memoryview(layout.header)
    for placed in layout.placed:
        tensor = tensors[placed.shard]
        plain = tensor.cpu().contiguous()
        view = memory_of(plain)
        if plain is not tensor:  # whoever uploads the view may hold it longer than we hold the copy
            view = memoryview(bytearray(view))
        sums[placed.key] = checksum(view, best_algorithm())
        yield view


def _common(metadata: Metadata, results: Sequence[Sequence[WriteResult]], step: int) -> Any:
    """The state dict as the user nested it, tensors by name; DCP's planner tells where each name came from."""
    objects = {r.index.fqn: r.storage_data for part in results for r in part}
    values = {
        name: objects.get(name) if isinstance(entry, BytesStorageMetadata) else torch.empty(0)
        for name, entry in metadata.state_dict_metadata.items()
    }
    paths = metadata.planner_data or {}
    nested = unflatten_state_dict(values, {name: paths.get(name, (name,)) for name in values})
    return flatten({"step": step, **nested}).skeleton
