"""Storage reader and writer for plain `torch.distributed.checkpoint` (`save`, `async_save`, `load`).

    dcp.save(state_dict, storage_writer=StorageWriter("/nvme/run-1/checkpoint_step_00000500"))
    dcp.load(state_dict, storage_reader=StorageReader("/nvme/run-1/checkpoint_step_00000500"))

Writing: every rank writes one data file and one index; the coordinator commits them with the manifest. A failed save
leaves no checkpoint. Nothing is pickled: a value that is neither a tensor nor plain data is refused with its path.
`load_checkpoint(path)` and `allranks checkpoint` read the result.

Reading: names are the paths in the state, joined by dots, of tensors and of plain values
(`optimizer_state_dict.param_groups.0.lr`). Every byte is verified. torch's HuggingFaceStorageReader can read the tensors of
the same folders, without verification.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as facts
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import storage
from torch.futures import Future

from allranks import torch_private
from allranks.checkpoint.checksum import best_algorithm, checksum
from allranks.checkpoint.manifest import FileLayout, Index, Shard, encode_manifest, lay_out
from allranks.checkpoint.restore.into_state import skeletons
from allranks.checkpoint.restore.opened_checkpoint import Opened, opened
from allranks.checkpoint.restore.tensor_reader import FillTarget, fill, read_whole, reading_list, stored_dtype
from allranks.checkpoint.save.plan import shard_of
from allranks.checkpoint.save.writer import SaveJob, collect, part_file, with_file, write_index
from allranks.checkpoint.stores import Attempt, Store, StoreSpec, open_store, split_address, step_in_name
from allranks.checkpoint.tensors import flatten, memory_of, tensor_names, unflatten


@dataclasses.dataclass(frozen=True)
class RankTicket:
    """Sent by the coordinator to each rank: its rank, all ranks of this save, and the token of the attempt."""

    rank: int
    ranks: tuple[int, ...]
    token: str


class _Storage:
    """The path or URL of one checkpoint, for reader and writer. `options` belong to the store."""

    def __init__(self, path: str, options: Mapping[str, str] | None = None) -> None:
        self.path = str(path)
        self.options = dict(options or {})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = str(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts any path or URL."""
        return True

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Store, str]]:
        base, name = split_address(self.path)
        with contextlib.closing(open_store(StoreSpec(base, self.options))) as store:
            yield store, name


class StorageWriter(_Storage, storage.StorageWriter):
    """Writes one checkpoint to STORE/NAME, a path or URL; the step is the number in NAME unless given."""

    def __init__(self, path: str, options: Mapping[str, str] | None = None, step: int | None = None) -> None:
        super().__init__(path, options)
        self.step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to set up: the first write creates folders."""

    def storage_meta(self) -> facts.StorageMeta:
        return facts.StorageMeta(self.path)

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        """On the coordinator: creates one attempt for all ranks."""
        token, ranks = secrets.token_hex(6), tuple(range(len(plans)))
        return [
            dataclasses.replace(plan, storage_data=RankTicket(rank, ranks, token))
            for rank, plan in enumerate(plans)
        ]

    def write_data(
        self, plan: planning.SavePlan, planner: planning.SavePlanner
    ) -> Future[list[storage.WriteResult]]:
        """Writes this rank's data file and index; both are durable when it returns."""
        self._ticket: RankTicket = plan.storage_data
        objects, tensors, results = {}, [], []
        for item in plan.items:
            name, size = item.index.fqn, 0
            if item.type == planning.WriteItemType.BYTE_IO:
                objects[name] = _object(item, planner)
                for key, tensor in flatten(objects[name], prefix=name).tensors.items():
                    chunk = facts.ChunkStorageMetadata(torch.Size((0,) * tensor.dim()), tensor.shape)
                    data = planning.TensorWriteData(
                        chunk, facts.TensorProperties(dtype=tensor.dtype), tensor.shape
                    )
                    tensors.append((shard_of(key, tensor.dtype, data), tensor))
            else:
                data, size = item.tensor_data, item.tensor_storage_size() or 0
                shard = shard_of(name, data.properties.dtype, data)
                tensors.append((shard, planner.resolve_data(item).detach()))
            results.append(storage.WriteResult(item.index, size, objects.get(name)))
        with self._open() as (store, name):
            attempt = Attempt(name, self._ticket.token)
            self._write(store, attempt, [pair for pair in tensors if pair[0].bytes or 0 in pair[0].shape])
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: facts.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """On the coordinator: writes the nested state into its index, then the manifest."""
        ranks = self._ticket.ranks
        with self._open() as (store, name):
            step = self.step if self.step is not None else step_in_name(name) or 0
            attempt = Attempt(name, self._ticket.token)
            index = dataclasses.replace(self._index, common=_common(metadata, results, step))
            mine = write_index(store, attempt, index)
            job = SaveJob(
                store.spec, attempt, index.rank, ranks, len(ranks), step, 0, time.time(), index.algorithm
            )
            store.commit(attempt, encode_manifest(collect(job, mine, store, lambda: True)))
            store.leave(attempt)
            store.tidy()

    def _write(self, store: Store, attempt: Attempt, tensors: list[tuple[Shard, torch.Tensor]]) -> None:
        rank, ranks = self._ticket.rank, self._ticket.ranks
        layout = lay_out([shard for shard, _ in tensors])
        by_shard, sums = dict(tensors), dict[str, str]()
        name = part_file(store, attempt, rank, "safetensors")
        store.write(attempt, name, _pieces(layout, by_shard, sums), layout.bytes)
        self._index = with_file(Index(rank, best_algorithm(), (), ()), name, layout, sums)
        if rank != ranks[0]:
            write_index(store, attempt, self._index)


def _object(item: planning.WriteItem, planner: Any) -> Any:
    """The plain value; if the planner has pickled it, it is unpickled without running code."""
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return torch.load(data, weights_only=True)


def _pieces(
    layout: FileLayout, tensors: Mapping[Shard, torch.Tensor], sums: dict[str, str]
) -> Iterator[memoryview]:
    """The file's bytes, one tensor after the other; each is hashed when its turn comes."""
    yield memoryview(layout.header)
    for placed in layout.placed:
        tensor = tensors[placed.shard]
        plain = tensor.cpu().contiguous()
        view = memory_of(plain)
        if plain is not tensor:  # an upload may hold the view longer than we hold the copy
            view = memoryview(bytearray(view))
        sums[placed.key] = checksum(view, best_algorithm())
        yield view


def _common(metadata: facts.Metadata, results: Sequence[Sequence[storage.WriteResult]], step: int) -> Any:
    """The state dict with the user's nesting, which DCP's planner keeps in `planner_data`; tensors by name."""
    objects = {r.index.fqn: r.storage_data for part in results for r in part}
    values = {
        name: objects.get(name) if isinstance(entry, facts.BytesStorageMetadata) else torch.empty(0)
        for name, entry in metadata.state_dict_metadata.items()
    }
    paths = metadata.planner_data or {}
    nested = torch_private.unflatten(values, {name: paths.get(name, (name,)) for name in values})
    return flatten({"step": step, **nested}).skeleton


class StorageReader(_Storage, storage.StorageReader):
    """Reads one checkpoint by path or URL. `options` belong to the store (endpoint, keys …)."""

    def read_metadata(self, *args: object, **kwargs: object) -> facts.Metadata:
        """The names, shapes and chunks that DCP's planners need."""
        entries: dict[str, facts.TensorStorageMetadata | facts.BytesStorageMetadata] = {}
        with self._open() as (store, name), opened(store, name) as checkpoint:
            for name, stored in checkpoint.table().items():
                shard = stored[0][1].shard
                chunks = [
                    facts.ChunkStorageMetadata(torch.Size(s.shard.offsets), torch.Size(s.shard.sizes))
                    for _, s in stored
                ]
                entries[name] = facts.TensorStorageMetadata(
                    facts.TensorProperties(dtype=stored_dtype(shard)), torch.Size(shard.shape), chunks
                )
            entries.update({name: facts.BytesStorageMetadata() for name in _objects(checkpoint)})
        return facts.Metadata(entries, storage_meta=facts.StorageMeta())

    def set_up_storage_reader(
        self, metadata: facts.Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        """Reads and verifies each saved chunk once, and copies the requested regions."""
        plain = [item for item in plan.items if item.type == planning.LoadItemType.BYTE_IO]
        wanted = [item for item in plan.items if item.type != planning.LoadItemType.BYTE_IO]
        tensors = [(item, planner.resolve_tensor(item).detach()) for item in wanted]
        targets = [
            FillTarget(
                item.storage_index.fqn,
                tensor,
                tuple(map(add, item.storage_index.offset or (0,) * tensor.dim(), item.storage_offsets)),
            )
            for item, tensor in tensors
        ]
        with self._open() as (store, name), opened(store, name) as checkpoint:
            fill(checkpoint, reading_list(checkpoint, targets))
            objects = _objects(checkpoint) if plain else {}
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        for item in plain:
            # DCP's planner expects bytes of torch.save: made here from plain data, never read from a file
            pickled = io.BytesIO()
            torch.save(objects[item.storage_index.fqn], pickled)
            pickled.seek(0)
            planner.load_bytes(item, pickled)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _objects(checkpoint: Opened) -> dict[str, object]:
    """Name (as in DCP's planner) → value, for everything that is not a tensor."""
    common, _ = skeletons(checkpoint, 0)
    tensors = {name: torch.empty(0) for name in tensor_names(common)}
    tensors.update(read_whole(checkpoint, tensor_names(common, ("$ndarray",))))
    flat, _ = torch_private.flatten(unflatten(common, tensors))
    return {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}
