"""A checkpoint opened for reading: its manifest, indexes and data files. Also verifies and copies checkpoints. No torch."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from allranks.checkpoint import checksum as checksums
from allranks.checkpoint.manifest import (
    IS_NEWER,
    MANIFEST,
    Index,
    Manifest,
    Part,
    StoredShard,
    decode_index,
    decode_manifest,
    encode_manifest,
    lay_out,
)
from allranks.checkpoint.save.writer import part_file, with_file, write_index
from allranks.checkpoint.stores import Attempt, DataReader, Store, quoted, reason_of, store_arguments
from allranks.errors import CheckpointDamaged, CheckpointValidationError

REQUESTS = 8  # concurrent requests to a store in which each read is a request
REQUEST_BYTES = 16 << 20
Progress = Callable[[int], None]  # bytes since the last call


@dataclass
class Opened:
    """Manifest and indexes of one checkpoint. Data files are opened and checked at their first use."""

    store: Store
    name: str
    manifest: Manifest
    indexes: tuple[Index, ...]
    progress: Callable[[int], None] | None = None  # called with the size of every verified shard
    _sources: dict[str, DataReader] = field(default_factory=dict)
    _table: dict[str, list[tuple[Index, StoredShard]]] | None = None

    @property
    def path(self) -> str:
        """The path of the checkpoint as shown to the user."""
        return self.store.path_of(self.name)

    def shards(self) -> Iterator[tuple[Index, StoredShard]]:
        """Every stored shard with its index."""
        return ((index, stored) for index in self.indexes for stored in index.shards)

    def table(self) -> dict[str, list[tuple[Index, StoredShard]]]:
        """Tensor name → its stored shards; a chunk written by two ranks is listed once."""
        if self._table is None:
            self._table = {}
            seen = set()
            for index, stored in self.shards():
                shard = stored.shard
                if (shard.name, shard.offsets, shard.sizes) not in seen:
                    seen.add((shard.name, shard.offsets, shard.sizes))
                    self._table.setdefault(shard.name, []).append((index, stored))
        return self._table

    def source(self, file: str) -> DataReader:
        """An open data file, whose size and header match the index."""
        if file not in self._sources:
            self._sources[file] = self._open(file)
        return self._sources[file]

    def read_run(self, run: Sequence[tuple[Index, StoredShard, memoryview]]) -> None:
        """Reads and verifies adjacent shards of one file; raises CheckpointDamaged.

        Uses one read for small shards and for stores in which each read is a request.
        """
        first, last = run[0][1], run[-1][1]
        source, length = self.source(first.file), last.start + last.shard.bytes - first.start
        if length > checksums.TOGETHER_BYTES and not source.wide_reads:
            for index, stored, view in run:
                starts = range(0, len(view), checksums.READ_BYTES)
                self._check_pieces(index, stored, (view[at : at + checksums.READ_BYTES] for at in starts))
            return
        with self._whole(last):
            if len(run) == 1 and length > REQUEST_BYTES:
                self._read_parallel(source, first.start, run[0][2])
            else:
                source.read_views(first.start, [view for _, _, view in run])
        for index, stored, view in run:
            self._compare(checksums.checksum(view, index.algorithm), stored)

    def check_shard(self, index: Index, stored: StoredShard) -> None:
        """Verifies a shard without keeping its bytes; raises CheckpointDamaged."""
        length = stored.shard.bytes
        if self.source(stored.file).wide_reads:
            self.read_run([(index, stored, memoryview(bytearray(length)))])
        else:
            scratch = memoryview(bytearray(min(length, checksums.READ_BYTES)))
            pieces = (scratch[: min(left, len(scratch))] for left in range(length, 0, -len(scratch) or -1))
            self._check_pieces(index, stored, pieces)

    def _compare(self, found: str, stored: StoredShard) -> None:
        if self.progress is not None:
            self.progress(stored.shard.bytes)
        if found != stored.checksum:
            where = f"{stored.shard.name} in {stored.file} at byte {stored.start}"
            raise self._damaged(f"{where} does not match its checksum", stored.shard.name)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _check_pieces(self, index: Index, stored: StoredShard, pieces: Iterable[memoryview]) -> None:
        """Reads a shard in pieces and hashes each while it is in the core's cache."""
        source, hasher, at = self.source(stored.file), checksums.new_hasher(index.algorithm), stored.start
        with self._whole(stored):
            for piece in pieces:
                source.read_views(at, [piece])
                hasher.update(piece)
                at += len(piece)
        self._compare(hasher.hexdigest(), stored)

    @contextmanager
    def _whole(self, stored: StoredShard) -> Iterator[None]:
        """Converts EOFError into CheckpointDamaged."""
        try:
            yield
        except EOFError as error:
            raise self._damaged(f"{stored.file} is truncated: {error}", stored.shard.name) from error

    def _read_parallel(self, source: DataReader, start: int, view: memoryview) -> None:
        checksums.in_threads(
            REQUESTS,
            range(0, len(view), REQUEST_BYTES),
            lambda at: source.read_views(start + at, [view[at : at + REQUEST_BYTES]]),
        )

    def _open(self, file: str) -> DataReader:
        try:
            source = self.store.open(self.name, file)
        except FileNotFoundError as error:
            raise self._damaged(f"{file} is missing", file) from error
        expected, algorithm = next((f, i.algorithm) for i in self.indexes for f in i.files if f.file == file)
        if source.bytes != expected.bytes:
            raise self._damaged(f"{file} has {source.bytes} bytes instead of {expected.bytes}", file)
        header = memoryview(bytearray(expected.header_bytes))
        source.read_views(0, [header])
        if checksums.checksum(header, algorithm) != expected.header_checksum:
            raise self._damaged(f"the header of {file} does not match its checksum", file)
        return source

    def _damaged(self, reason: str, key: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            reason,
            invalid_keys=(key,),
            tier=self.store.tier,
            path=self.path,
            hint=f"list all damage: allranks checkpoint verify {store_arguments(self.path, self.store.spec.options)}",
        )


@contextmanager
def opened(store: Store, name: str, progress: Callable[[int], None] | None = None) -> Iterator[Opened]:
    """Opens a checkpoint for reading; it is protected from removal while open."""
    with ExitStack() as stack:
        try:
            stack.enter_context(store.reading(name))
            manifest = decode_manifest(store.read(name, MANIFEST), store.path_of(name))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamaged(
                f"no manifest: not a complete checkpoint ({MANIFEST} is missing)",
                missing_keys=(MANIFEST,),
                tier=store.tier,
                path=store.path_of(name),
                hint=f"from another program? allranks checkpoint import {quoted(store.path_of(name))} STORE",
            ) from error
        indexes: dict[int, Index] = {}
        checksums.in_threads(
            REQUESTS,
            enumerate(manifest.parts),
            lambda one: indexes.update({one[0]: _read_index(store, name, one[1])}),
        )
        inside = tuple(indexes[number] for number in sorted(indexes))
        checkpoint = Opened(store, name, manifest, inside, progress)
        stack.callback(checkpoint.close)
        yield checkpoint


def _read_index(store: Store, name: str, part: Part) -> Index:
    path, problem = store.path_of(name), ""
    try:
        data = store.read(name, part.index)
        if len(data) != part.index_bytes or hashlib.sha256(data).hexdigest() != part.index_sha256:
            problem = "does not match the manifest"
    except FileNotFoundError:
        problem = "is missing"
    if problem:
        raise CheckpointDamaged(
            f"{part.index} {problem}", invalid_keys=(part.index,), tier=store.tier, path=path
        )
    return decode_index(data, f"{path}/{part.index}")


@dataclass(frozen=True)
class Verified:
    """The result of `verify`: without `problems`, every byte is as written."""

    path: str
    step: int
    tensors: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def newer(self) -> bool:
        """Whether a newer version of allranks saved it."""
        return any(IS_NEWER in problem for problem in self.problems)


def verify_checkpoint(store: Store, name: str, progress: Progress = lambda _: None) -> Verified:
    """Verifies every checksum; continues after the first problem."""
    try:
        with opened(store, name, progress) as checkpoint:
            return _verify(checkpoint)
    except CheckpointValidationError as error:
        return Verified(store.path_of(name), -1, 0, 0, (error.reason,))


def copy_checkpoint(
    source: Store, name: str, target: Store, new_name: str, progress: Progress = lambda _: None
) -> Manifest:
    """Copies a checkpoint and verifies every byte."""
    attempt = Attempt(new_name, secrets.token_hex(6))
    with opened(source, name, progress) as checkpoint:
        old = checkpoint.manifest
        with ExitStack() as undo:
            undo.callback(target.abandon, attempt)
            parts = tuple(_copy_part(checkpoint, index, target, attempt) for index in checkpoint.indexes)
            manifest = replace(old, attempt=attempt.token, parts=parts)
            target.commit(attempt, encode_manifest(manifest))
            undo.pop_all()
        return manifest


def shard_bytes(checkpoint: Opened) -> int:
    """Total size of all tensors in bytes."""
    return sum(stored.shard.bytes for _, stored in checkpoint.shards())


def _verify(checkpoint: Opened) -> Verified:
    shards, bad = list(checkpoint.shards()), _damaged_files(checkpoint)
    found: dict[int, str] = {}

    def verify(numbered: tuple[int, tuple[Index, StoredShard]]) -> None:
        number, (index, stored) = numbered
        try:
            checkpoint.check_shard(index, stored)
        except CheckpointDamaged as error:
            found[number] = error.reason
        except OSError as error:
            found[number] = f"{stored.file}: {reason_of(error)}"

    checksums.in_threads(
        checksums.cores(), [one for one in enumerate(shards) if one[1][1].file not in bad], verify
    )
    problems = [*bad.values(), *(found[number] for number in sorted(found))]
    return Verified(
        checkpoint.path,
        checkpoint.manifest.step,
        len(shards),
        shard_bytes(checkpoint),
        tuple(dict.fromkeys(problems)),
    )


def _damaged_files(checkpoint: Opened) -> dict[str, str]:
    """Data file → problem with its size or header; the file of a rank without tensors has a header, too."""
    bad = {}
    named = [file.file for index in checkpoint.indexes for file in index.files]
    for file in dict.fromkeys([*named, *(stored.file for _, stored in checkpoint.shards())]):
        try:
            checkpoint.source(file)
        except CheckpointDamaged as error:
            bad[file] = error.reason
        except OSError as error:
            bad[file] = f"{file}: {reason_of(error)}"
    return bad


def _copy_part(checkpoint: Opened, index: Index, target: Store, attempt: Attempt) -> Part:
    name = part_file(target, attempt, index.rank, "safetensors")
    layout = lay_out([stored.shard for stored in index.shards])
    places = {stored.shard: stored for stored in index.shards}

    def pieces() -> Iterator[memoryview]:
        yield memoryview(layout.header)
        for placed in layout.placed:
            view = memoryview(bytearray(placed.shard.bytes))
            checkpoint.read_run([(index, places[placed.shard], view)])
            yield view

    target.write(attempt, name, pieces(), layout.bytes)
    sums = {p.key: places[p.shard].checksum for p in layout.placed}
    return write_index(target, attempt, with_file(index, name, layout, sums))
