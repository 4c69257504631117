"""A checkpoint opened for reading: its manifest and indexes, checked, and its data files. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from allranks.checkpoint import checksum as checksums
from allranks.checkpoint import manifest as manifests
from allranks.checkpoint.stores import DataReader, Store, quoted, store_arguments
from allranks.errors import CheckpointDamaged

#: Requests under way at once towards a store where each read is a request, and the bytes of each.
REQUESTS = 8
REQUEST_BYTES = 16 << 20


@dataclass
class Opened:
    """Manifest and indexes of one checkpoint. Data files are opened on first use, and checked then."""

    store: Store
    name: str
    manifest: manifests.Manifest
    indexes: tuple[manifests.Index, ...]
    progress: Callable[[int], None] | None = None  # called with the bytes of every shard that was checked
    _sources: dict[str, DataReader] = field(default_factory=dict)
    _requests: ThreadPoolExecutor | None = None
    _table: dict[str, list[tuple[manifests.Index, manifests.StoredShard]]] | None = None

    @property
    def path(self) -> str:
        """How the checkpoint is called towards the user."""
        return self.store.path_of(self.name)

    def shards(self) -> Iterator[tuple[manifests.Index, manifests.StoredShard]]:
        """Every stored shard with the index that names it."""
        return ((index, stored) for index in self.indexes for stored in index.shards)

    def table(self) -> dict[str, list[tuple[manifests.Index, manifests.StoredShard]]]:
        """Tensor name → its stored shards; a chunk that two ranks wrote is listed once."""
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
        """An open data file whose size and header are what the index says."""
        if file not in self._sources:
            self._sources[file] = self._open(file)
        return self._sources[file]

    def read_shard(self, index: manifests.Index, stored: manifests.StoredShard, view: memoryview) -> None:
        """Reads a shard's bytes into `view` and checks them; CheckpointDamaged names what is damaged."""
        source = self.source(stored.file)
        if source.wide_reads:
            with self._whole(stored):
                self._read_parallel(source, stored.start, view)
            self.check(index, stored, view)
        else:
            pieces = (
                view[at : at + checksums.READ_BYTES] for at in range(0, len(view), checksums.READ_BYTES)
            )
            self._check_pieces(index, stored, pieces)

    def read_run(self, run: Sequence[tuple[manifests.Index, manifests.StoredShard, memoryview]]) -> None:
        """Reads neighbouring shards of one file, each into its own memory, and checks them: small ones with one
        read."""
        first, last = run[0][1], run[-1][1]
        if last.start + last.shard.bytes - first.start > checksums.TOGETHER_BYTES:
            for index, stored, view in run:
                self.read_shard(index, stored, view)
            return
        with self._whole(last):
            self.source(first.file).read_views(first.start, [view for _, _, view in run])
        for index, stored, view in run:
            self.check(index, stored, view)

    def check_shard(self, index: manifests.Index, stored: manifests.StoredShard) -> None:
        """Reads a shard and keeps nothing of it; CheckpointDamaged names what is damaged."""
        length = stored.shard.bytes
        if self.source(stored.file).wide_reads:
            self.read_shard(index, stored, memoryview(bytearray(length)))
        else:
            scratch = memoryview(bytearray(min(length, checksums.READ_BYTES)))
            pieces = (scratch[: min(left, len(scratch))] for left in range(length, 0, -len(scratch) or -1))
            self._check_pieces(index, stored, pieces)

    def check(self, index: manifests.Index, stored: manifests.StoredShard, view: memoryview) -> None:
        """Checks bytes that were read some other way."""
        self._compare(checksums.checksum(view, index.algorithm), stored)

    def _compare(self, found: str, stored: manifests.StoredShard) -> None:
        if self.progress is not None:
            self.progress(stored.shard.bytes)
        if found != stored.checksum:
            where = f"{stored.shard.name} in {stored.file} at byte {stored.start}"
            raise self._damaged(f"{where} does not match its checksum", stored.shard.name)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        if self._requests is not None:
            self._requests.shutdown()

    def _check_pieces(
        self, index: manifests.Index, stored: manifests.StoredShard, pieces: Iterable[memoryview]
    ) -> None:
        """Reads a shard piece by piece; each is hashed while it is in the core's cache."""
        source, hasher, at = self.source(stored.file), checksums.new_hasher(index.algorithm), stored.start
        with self._whole(stored):
            for piece in pieces:
                source.read_into(at, piece)
                hasher.update(piece)
                at += len(piece)
        self._compare(hasher.hexdigest(), stored)

    @contextmanager
    def _whole(self, stored: manifests.StoredShard) -> Iterator[None]:
        """A file that ends too early is a damaged one."""
        try:
            yield
        except EOFError as error:
            raise self._damaged(f"{stored.file} is cut short: {error}", stored.shard.name) from error

    def _read_parallel(self, source: DataReader, start: int, view: memoryview) -> None:
        if len(view) <= REQUEST_BYTES:
            source.read_into(start, view)
            return
        if self._requests is None:
            self._requests = ThreadPoolExecutor(REQUESTS, "allranks-ranges")
        offsets = range(0, len(view), REQUEST_BYTES)
        jobs = [
            self._requests.submit(source.read_into, start + at, view[at : at + REQUEST_BYTES])
            for at in offsets
        ]
        for job in jobs:
            job.result()

    def _open(self, file: str) -> DataReader:
        try:
            source = self.store.open(self.name, file)
        except FileNotFoundError as error:
            raise self._damaged(f"{file} is missing", file) from error
        expected, algorithm = next((f, i.algorithm) for i in self.indexes for f in i.files if f.file == file)
        if source.bytes != expected.bytes:
            raise self._damaged(f"{file} has {source.bytes} bytes instead of {expected.bytes}", file)
        header = memoryview(bytearray(expected.header_bytes))
        source.read_into(0, header)
        if checksums.checksum(header, algorithm) != expected.header_checksum:
            raise self._damaged(f"the header of {file} does not match its checksum", file)
        return source

    def _damaged(self, reason: str, key: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            reason,
            invalid_keys=(key,),
            tier=self.store.tier,
            path=self.path,
            hint=f"all that is damaged: allranks checkpoint verify {store_arguments(self.path, self.store.spec.options)}",
        )


@contextmanager
def opened(store: Store, name: str, progress: Callable[[int], None] | None = None) -> Iterator[Opened]:
    """Opens a checkpoint for reading and protects it from removal meanwhile."""
    with ExitStack() as stack:
        try:
            stack.enter_context(store.reading(name))
            manifest = manifests.decode_manifest(store.read(name, manifests.MANIFEST), store.path_of(name))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointDamaged(
                f"no manifest: not a complete checkpoint ({manifests.MANIFEST} is missing)",
                missing_keys=(manifests.MANIFEST,),
                tier=store.tier,
                path=store.path_of(name),
                hint=f"of another program? allranks checkpoint import {quoted(store.path_of(name))} STORE",
            ) from error
        if len(manifest.parts) == 1:
            indexes = [_read_index(store, name, manifest.parts[0])]
        else:
            with ThreadPoolExecutor(REQUESTS, "allranks-index") as pool:
                indexes = list(pool.map(partial(_read_index, store, name), manifest.parts))
        checkpoint = Opened(store, name, manifest, tuple(indexes), progress)
        stack.callback(checkpoint.close)
        yield checkpoint


def _read_index(store: Store, name: str, part: manifests.Part) -> manifests.Index:
    path, problem = store.path_of(name), ""
    try:
        data = store.read(name, part.index)
        if len(data) != part.index_bytes or hashlib.sha256(data).hexdigest() != part.index_sha256:
            problem = "is not the file the manifest names"
    except FileNotFoundError:
        problem = "is missing"
    if problem:
        raise CheckpointDamaged(
            f"{part.index} {problem}", invalid_keys=(part.index,), tier=store.tier, path=path
        )
    return manifests.decode_index(data, f"{path}/{part.index}")
