"""Reads tensors out of a checkpoint, whole or just the chunks a rank needs, and checks every byte it uses.

A running model changes only when everything it is to get is known to be right. What lies on a disk is read twice
for that: through a small buffer to check it, then out of the page cache straight into the tensors (and checked again
where it is no longer there). What comes over a network comes once, and waits in memory until all of it is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from allranks.checkpoint.checksum import READ_BYTES
from allranks.checkpoint.manifest import Index, StoredShard
from allranks.checkpoint.opened import Opened
from allranks.checkpoint.parallel import cores, in_threads
from allranks.checkpoint.regions import Item, Target, empty_for, new_targets, reading_list, stored_dtype
from allranks.checkpoint.tensors import memory_of
from allranks.errors import CheckpointDamaged

#: Neighbouring small shards are fetched together from stores where a read is a request.
BATCH_BYTES = 32 << 20
#: Neighbouring shards on a disk are read together: a few hundred calls instead of thousands.
RUN_BYTES = 4 << 20
MOST_IN_A_RUN = 512  # a vectored read takes 1024 pieces
#: What a disk is told to begin with before it is needed.
RUNS_AHEAD = 8
#: Requests for runs of shards under way at once.
RUNS = 4
#: Shards from this size on are read first: one of them at the end would leave the other threads without work.
LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """Content that was found right: new tensors are filled, live ones untouched until `finish`."""

    checkpoint: Opened
    unread: Sequence[list[Item]]
    staged: Sequence[tuple[Item, torch.Tensor]]

    def finish(self) -> None:
        """Fills the live tensors. What raises now has left part of the content in them."""
        in_threads(cores(), _large_first(self.unread), lambda: _Fill(self.checkpoint))
        for item, whole in self.staged:
            item.place(whole)


def read_whole(checkpoint: Opened, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """New CPU tensors with the whole content of the named ones, in the order asked for."""
    targets = new_targets(checkpoint, names)
    prepare(checkpoint, targets).finish()
    return {target.name: target.tensor for target in targets}


def prepare(checkpoint: Opened, targets: Sequence[Target]) -> Prepared:
    """Fills the new targets and checks what the live ones are to get.

    Raises CheckpointValidationError if anything is missing or does not fit, CheckpointDamaged if any byte is
    not what was written.
    """
    items = reading_list(checkpoint, targets)
    # opened and checked here, not in several threads at once
    sources = {file: checkpoint.source(file) for file in dict.fromkeys(item.stored.file for item in items)}
    far = [item for item in items if sources[item.stored.file].wide_reads]
    near = [item for item in items if not sources[item.stored.file].wide_reads]
    live = _runs([item for item in near if item.live], RUN_BYTES)
    new = _runs([item for item in near if not item.live], RUN_BYTES)
    runs = _large_first([*live, *new])
    ahead = _Ahead(checkpoint, runs)
    in_threads(cores(), runs, lambda: _Check(checkpoint, ahead))
    staged: list[tuple[Item, torch.Tensor]] = []
    in_threads(RUNS, _runs(far, BATCH_BYTES), lambda: _Fetch(checkpoint, staged))
    return Prepared(checkpoint, live, staged)


class _Ahead:
    """Tells the disk what comes, a few runs before it is needed. All threads share one."""

    def __init__(self, checkpoint: Opened, runs: Sequence[list[Item]]) -> None:
        self.checkpoint = checkpoint
        self._coming = list(runs)
        self._coming.reverse()
        for _ in range(RUNS_AHEAD):
            self.move_on()

    def move_on(self) -> None:
        """One run more."""
        with suppress(IndexError):
            run = self._coming.pop()
            first, last = run[0].stored, run[-1].stored
            length = last.start + last.shard.bytes - first.start
            self.checkpoint.source(first.file).expect(first.start, length)


class _Check:
    """Reads what goes into new tensors; only checks what goes into live ones. One per thread, as the others."""

    def __init__(self, checkpoint: Opened, ahead: _Ahead) -> None:
        self.checkpoint = checkpoint
        self.ahead = ahead
        self.scratch = memoryview(bytearray(READ_BYTES))

    def __call__(self, run: list[Item]) -> None:
        self.ahead.move_on()
        if run[0].live:
            self.checkpoint.check_run([(item.index, item.stored) for item in run], self.scratch)
            return
        for item in run:
            _put(item, self.checkpoint.read_shard)


class _Fill:
    """Reads what has been checked into the live tensors: a run of them at once where each is one piece of memory."""

    def __init__(self, checkpoint: Opened) -> None:
        self.checkpoint = checkpoint

    def __call__(self, run: list[Item]) -> None:
        views = [item.direct_view() for item in run]
        whole = [view for view in views if view is not None]
        source = self.checkpoint.source(run[0].stored.file)
        if len(whole) == len(run) and source.read_cached(run[0].stored.start, whole):
            return
        for item in run:
            _put(item, self.checkpoint.read_shard)


def _put(item: Item, read: Callable[[Index, StoredShard, memoryview], None]) -> None:
    """Reads an item straight into its place if that is one piece of memory, else by way of a tensor of its own."""
    direct = item.direct_view()
    if direct is not None:
        read(item.index, item.stored, direct)
        return
    whole = empty_for(item.stored.shard)
    read(item.index, item.stored, memory_of(whole))
    item.place(whole)


class _Fetch:
    """Fetches runs of neighbours with few requests; keeps what is meant for live tensors."""

    def __init__(self, checkpoint: Opened, staged: list[tuple[Item, torch.Tensor]]) -> None:
        self.checkpoint = checkpoint
        self.staged = staged

    def __call__(self, run: list[Item]) -> None:
        for item, whole in self._fetched(run):
            if item.live:
                self.staged.append((item, whole))
            else:
                item.place(whole)

    def _fetched(self, run: list[Item]) -> Iterator[tuple[Item, torch.Tensor]]:
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


def _tensor_over(buffer: bytearray, at: int, item: Item) -> torch.Tensor:
    """A shard as a tensor over the bytes it came in."""
    shard = item.stored.shard
    if not shard.bytes:
        return empty_for(shard)
    dtype = stored_dtype(shard)
    count = shard.bytes // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shard.sizes)


def _large_first(runs: Sequence[list[Item]]) -> list[list[Item]]:
    """In the order of the files, but for the large ones."""
    return sorted(runs, key=lambda run: run[0].stored.shard.bytes < LARGE_BYTES)


def _runs(items: Iterable[Item], limit: int) -> list[list[Item]]:
    """Neighbouring shards of one file in runs of at most `limit` bytes (one shard may be longer)."""
    runs: list[list[Item]] = []
    for _, group in itertools.groupby(items, key=lambda item: item.stored.file):
        run: list[Item] = []
        for item in group:
            if not run or not _joins(run, item, limit):
                run = []
                runs.append(run)
            run.append(item)
    return runs


def _joins(run: list[Item], item: Item, limit: int) -> bool:
    first, last, stored = run[0].stored, run[-1].stored, item.stored
    follows = last.start + last.shard.bytes == stored.start and len(run) < MOST_IN_A_RUN
    return follows and stored.start + stored.shard.bytes - first.start <= limit
