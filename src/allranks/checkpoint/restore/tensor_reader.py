"""Reads tensors out of a checkpoint, whole or just the chunks a rank needs, and checks every byte it uses.

Everything goes straight into its tensor and is checked while it is in the core's cache. Targets that are `live` change
only when everything is known to be right: what lies on a disk is read twice for that, through a small buffer to check
it, then out of the page cache into the tensors (and checked again where it is no longer there); what comes over a
network comes once, and waits in memory until all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from allranks.checkpoint.checksum import TOGETHER_BYTES, cores, in_threads
from allranks.checkpoint.manifest import Index, StoredShard
from allranks.checkpoint.restore.opened_checkpoint import Opened, neighbours
from allranks.checkpoint.restore.regions import ReadItem, empty_for, new_targets, reading_list, stored_dtype
from allranks.checkpoint.tensors import memory_of
from allranks.errors import CheckpointDamaged

#: Neighbouring small shards are fetched together from stores where a read is a request.
BATCH_BYTES = 32 << 20
#: What one thread reads in a row at most, so that the kernel reads ahead for it.
ROW_BYTES = 32 << 20
#: Requests for runs of shards under way at once.
RUNS = 4
#: Shards from this size on are read first: one of them at the end would leave the other threads without work.
LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """Content that was found right: new tensors are filled, live ones untouched until `finish`."""

    checkpoint: Opened
    unread: Sequence[list[ReadItem]]
    staged: Sequence[tuple[ReadItem, torch.Tensor]]

    def finish(self) -> None:
        """Fills the live tensors. What raises now has left part of the content in them."""
        in_threads(cores(), _large_first(self.unread), lambda: _Fill(self.checkpoint))
        for item, whole in self.staged:
            item.place(whole)


def read_whole(checkpoint: Opened, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """New CPU tensors with the whole content of the named ones, in the order asked for."""
    targets = new_targets(checkpoint, names)
    prepare(checkpoint, reading_list(checkpoint, targets)).finish()
    return {target.name: target.tensor for target in targets}


def prepare(checkpoint: Opened, items: Sequence[ReadItem]) -> Prepared:
    """Fills the targets of a reading list, but for live ones: what they are to get is only checked.

    Raises CheckpointDamaged if any byte is not what was written.
    """
    # opened and checked here, not in several threads at once
    far = {
        file
        for file in dict.fromkeys(item.stored.file for item in items)
        if checkpoint.source(file).wide_reads
    }
    near = [item for item in items if item.stored.file not in far] if far else items
    live = _runs([item for item in near if item.live], TOGETHER_BYTES)
    new = _runs([item for item in near if not item.live], TOGETHER_BYTES)
    in_threads(cores(), _rows([*live, *new]), lambda: _Read(checkpoint))
    staged: list[tuple[ReadItem, torch.Tensor]] = []
    fetched = _runs([item for item in items if item.stored.file in far], BATCH_BYTES)
    in_threads(RUNS, fetched, lambda: _Fetch(checkpoint, staged))
    return Prepared(checkpoint, live, staged)


class _Read:
    """Reads and checks runs in a row; what goes into live tensors is only checked. One per thread, as the others."""

    def __init__(self, checkpoint: Opened) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def scratch(self) -> memoryview:
        """Made where it is needed: a megabyte of new memory costs as much as reading one."""
        return memoryview(bytearray(TOGETHER_BYTES))

    def __call__(self, row: Sequence[list[ReadItem]]) -> None:
        for run in row:
            if run[0].live:
                self.checkpoint.check_run([(item.index, item.stored) for item in run], self.scratch)
            else:
                self._read(run)

    def _read(self, run: list[ReadItem]) -> None:
        direct = [
            (item.index, item.stored, memory_of(item.direct)) for item in run if item.direct is not None
        ]
        if len(direct) == len(run):
            self.checkpoint.read_run(direct)
            return
        for item in run:
            _put(item, self.checkpoint.read_shard)


class _Fill:
    """Reads what has been checked into the live tensors: a run of them at once where each is one piece of memory."""

    def __init__(self, checkpoint: Opened) -> None:
        self.checkpoint = checkpoint

    def __call__(self, run: list[ReadItem]) -> None:
        whole = [memory_of(item.direct) for item in run if item.direct is not None]
        source = self.checkpoint.source(run[0].stored.file)
        if len(whole) == len(run) and source.read_cached(run[0].stored.start, whole):
            return
        for item in run:
            _put(item, self.checkpoint.read_shard)


def _put(item: ReadItem, read: Callable[[Index, StoredShard, memoryview], None]) -> None:
    """Reads an item straight into its place if that is one piece of memory, else by way of a tensor of its own."""
    if item.direct is not None:
        read(item.index, item.stored, memory_of(item.direct))
        return
    whole = empty_for(item.stored.shard)
    read(item.index, item.stored, memory_of(whole))
    item.place(whole)


class _Fetch:
    """Fetches runs of neighbours with few requests; keeps what is meant for live tensors."""

    def __init__(self, checkpoint: Opened, staged: list[tuple[ReadItem, torch.Tensor]]) -> None:
        self.checkpoint = checkpoint
        self.staged = staged

    def __call__(self, run: list[ReadItem]) -> None:
        if len(run) == 1 and not run[0].live:
            _put(run[0], self.checkpoint.read_shard)
            return
        for item, whole in self._fetched(run):
            if item.live:
                self.staged.append((item, whole))
            else:
                item.place(whole)

    def _fetched(self, run: list[ReadItem]) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        if len(run) == 1:
            whole = empty_for(run[0].stored.shard)
            self.checkpoint.read_shard(run[0].index, run[0].stored, memory_of(whole))
            yield run[0], whole
            return
        first, last = run[0].stored, run[-1].stored
        buffer = bytearray(last.start + last.shard.bytes - first.start)
        view = memoryview(buffer)
        try:
            self.checkpoint.source(first.file).read_into(first.start, view)
        except EOFError as error:
            raise CheckpointDamaged(
                f"{first.file} is cut short: {error}", invalid_keys=(first.file,), path=self.checkpoint.path
            ) from error
        for item in run:
            at, shard = item.stored.start - first.start, item.stored.shard
            self.checkpoint.check(item.index, item.stored, view[at : at + shard.bytes])
            yield item, _tensor_over(buffer, at, item)


def _tensor_over(buffer: bytearray, at: int, item: ReadItem) -> torch.Tensor:
    """A shard as a tensor over the bytes it came in."""
    shard = item.stored.shard
    if not shard.bytes:
        return empty_for(shard)
    dtype = stored_dtype(shard)
    count = shard.bytes // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shard.sizes)


def _rows(runs: Sequence[list[ReadItem]]) -> list[list[list[ReadItem]]]:
    """Runs in rows, in the order of the files, a few for every thread; the large ones first, each on its own."""
    ordered = _large_first(runs)
    limit = min(ROW_BYTES, sum(_length(run) for run in runs) // (4 * cores()))
    rows: list[list[list[ReadItem]]] = []
    length = limit
    for run in ordered:
        if length >= limit:
            rows.append([])
            length = 0
        rows[-1].append(run)
        length += _length(run)
    return rows


def _length(run: Sequence[ReadItem]) -> int:
    first, last = run[0].stored, run[-1].stored
    return last.start + last.shard.bytes - first.start


def _large_first(runs: Sequence[list[ReadItem]]) -> list[list[ReadItem]]:
    """In the order of the files, but for the large ones."""
    return sorted(runs, key=lambda run: run[0].stored.shard.bytes < LARGE_BYTES)


def _runs(items: Iterable[ReadItem], limit: int) -> list[list[ReadItem]]:
    return neighbours(items, lambda item: item.stored, limit)
