"""Writes one rank's part of a checkpoint and, on the first rank, commits it. No torch.

Runs in the helper process, or in the rank itself for a synchronous save. It either commits the whole checkpoint or raises.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from allranks.checkpoint.checksum import checksum
from allranks.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    FileLayout,
    Index,
    Manifest,
    Part,
    Skeleton,
    StoredShard,
    bytes_of_index,
    decode_manifest,
    encode_index,
    encode_manifest,
    part_name,
)
from allranks.checkpoint.stores import MAX_JSON_BYTES, Attempt, Store, StoreSpec, reason_of
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.listing import prune
from allranks.errors import AllranksError, CheckpointValidationError

T = TypeVar("T")


@dataclass(frozen=True)
class SaveJob:
    """A save without its bytes. `ranks` share the store; the first of them commits."""

    store: StoreSpec
    attempt: Attempt
    rank: int
    ranks: tuple[int, ...]
    world_size: int
    step: int
    epoch: int
    timestamp: float
    algorithm: str
    common: Skeleton = None
    own: Skeleton = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    keep_last: int = 0
    commit_timeout_s: float = 600.0
    retries: int = 0
    retry_delay_s: float = 5.0
    job: str = ""

    @property
    def path(self) -> str:
        """The path of the checkpoint as shown to the user."""
        return f"{self.store.url.rstrip('/')}/{self.attempt.name}"

    @property
    def tier(self) -> str:
        return self.store.tier


@dataclass(frozen=True)
class Saved:
    """A finished save. `left` are older checkpoints that were kept because they are being read."""

    path: str
    bytes: int
    total_s: float
    left: tuple[str, ...] = ()
    problem: str = ""  # why older checkpoints could not be removed


class PartMissing(AllranksError):
    """The part of another rank failed or never arrived, so the checkpoint was not committed."""


def write_checkpoint(
    job: SaveJob,
    layout: FileLayout,
    image: memoryview,
    store: Store,
    alive: Callable[[], bool] = lambda: True,
) -> Saved:
    """Writes this rank's part, waits for the other parts, commits, and prunes older checkpoints."""
    began = time.monotonic()
    try:
        part = _retrying(job, lambda: _write_part(job, layout, image, store))
        if job.rank == job.ranks[0]:
            manifest = collect(job, part, store, alive)
            _retrying(job, lambda: store.commit(job.attempt, encode_manifest(manifest)))
        else:
            _await_commit(job, store, alive)
    except BaseException as error:
        _give_up(job, store, error)
        raise
    finally:
        store.leave(job.attempt)
    left, problem = _remove_older(job, store) if job.rank == job.ranks[0] else ((), "")
    path, took_s = store.path_of(job.attempt.name), time.monotonic() - began
    return Saved(path, layout.bytes, took_s, left, problem)


def _remove_older(job: SaveJob, store: Store) -> tuple[tuple[str, ...], str]:
    """Prunes and tidies; (kept because they are being read, problem). A problem does not fail the save."""
    left: list[str] = []
    try:
        _, left = prune(store, job.keep_last, spare=job.attempt.name)
        store.tidy()
    except OSError as error:
        return tuple(left), reason_of(error)
    return tuple(left), ""


def _write_part(job: SaveJob, layout: FileLayout, image: memoryview, store: Store) -> Part:
    """Writes the data file, then the index; both are durable when it returns."""
    name = part_file(store, job.attempt, job.rank, "safetensors")
    sums: dict[str, str] = {}

    def hash_all() -> None:
        for p in layout.placed:
            sums[p.key] = checksum(image[p.start : p.start + p.shard.bytes], job.algorithm)

    hashing = threading.Thread(target=hash_all)  # in parallel with the write
    hashing.start()
    try:
        store.write(job.attempt, name, [image[: layout.bytes]], layout.bytes)
    finally:
        hashing.join()
    index = Index(job.rank, job.algorithm, (), (), job.common, job.own)
    return write_index(store, job.attempt, with_file(index, name, layout, sums))


def part_file(store: Store, attempt: Attempt, rank: int, suffix: str) -> str:
    return part_name(rank, suffix, attempt.token if store.attempt_in_names else "")


def with_file(index: Index, name: str, layout: FileLayout, sums: Mapping[str, str]) -> Index:
    """The index with one data file. `sums` are the checksums of its shards, by key."""
    head = checksum(layout.header, index.algorithm)
    file = DataFile(name, layout.bytes, len(layout.header), head)
    stored = tuple(StoredShard(p.shard, name, p.start, sums[p.key]) for p in layout.placed)
    return replace(index, files=(file,), shards=stored)


def write_index(store: Store, attempt: Attempt, index: Index) -> Part:
    """Writes an index file; returns the manifest's entry for it."""
    name, data = part_file(store, attempt, index.rank, "json"), encode_index(index)
    if len(data) > MAX_JSON_BYTES:  # no restore would read it
        text = f"values other than tensors take {len(data)} bytes, the limit is {MAX_JSON_BYTES}: use tensors or numpy arrays"
        raise OSError(errno.EFBIG, text)
    store.write(attempt, name, [memoryview(data)], len(data))
    return _part(index.rank, name, data, sum(file.bytes for file in index.files))


def _part(rank: int, name: str, data: bytes, size: int) -> Part:
    return Part(rank, name, len(data), hashlib.sha256(data).hexdigest(), size)


def _retrying(job: SaveJob, act: Callable[[], T]) -> T:
    """Retries after an OSError as often as the job allows, with a growing delay."""
    for attempt in range(job.retries + 1):
        try:
            return act()
        except OSError:
            if attempt == job.retries:
                raise
            time.sleep(job.retry_delay_s * (attempt + 1))
    raise AssertionError("unreachable")


def collect(job: SaveJob, mine: Part, store: Store, alive: Callable[[], bool]) -> Manifest:
    """Waits for the parts of all ranks; returns the manifest."""
    parts = {job.rank: mine}
    for wait in _polls(job, alive):
        for rank in [rank for rank in job.ranks if rank not in parts]:
            part = part_of(job, rank, store)
            if part is None:
                break
            parts[rank] = part
        if len(parts) == len(job.ranks):
            break
        if wait is None:
            missing = [rank for rank in job.ranks if rank not in parts]
            raise PartMissing(f"no part from ranks {missing} after {job.commit_timeout_s:.0f} s")
    ordered, head = tuple(parts[rank] for rank in job.ranks), (job.step, job.epoch, job.world_size)
    return Manifest(*head, job.timestamp, job.attempt.token, ordered, dict(job.metrics), job=job.job)


def part_of(job: SaveJob, rank: int, store: Store) -> Part | None:
    """The manifest's entry for a rank's part; None until the rank has written it."""
    name = part_file(store, job.attempt, rank, "json")
    data = store.staged(job.attempt, name)
    if data is None:
        failed = store.staged(job.attempt, part_file(store, job.attempt, rank, "failed"))
        if failed is not None:
            raise PartMissing(f"rank {rank} could not write its part: {_reason(failed)}")
        return None
    try:
        return _part(rank, name, data, bytes_of_index(data, name))
    except CheckpointValidationError:
        return None  # still being written


def _await_commit(job: SaveJob, store: Store, alive: Callable[[], bool]) -> None:
    """Waits until the first rank has committed this attempt."""
    first = job.ranks[0]
    for wait in _polls(job, alive):
        with contextlib.suppress(FileNotFoundError, CheckpointValidationError):
            manifest = decode_manifest(store.read(job.attempt.name, MANIFEST), job.attempt.name)
            if manifest.attempt == job.attempt.token:
                return
        failed = store.staged(job.attempt, part_file(store, job.attempt, first, "failed"))
        if failed is not None:
            raise PartMissing(f"rank {first} did not commit: {_reason(failed)}")
        if wait is None:
            raise PartMissing(f"rank {first} did not commit within {job.commit_timeout_s:.0f} s")


def _reason(failed: bytes) -> str:
    return failed.decode(errors="replace") or "its store is full (the reason is in its log)"


def _polls(job: SaveJob, alive: Callable[[], bool]) -> Iterator[float | None]:
    """Yields at growing intervals until the commit timeout, and None for the last poll; 10 s if the parent has died."""
    deadline, pause = time.monotonic() + job.commit_timeout_s, 0.002
    while time.monotonic() < deadline:
        yield pause
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)
        if not alive():
            deadline = min(deadline, time.monotonic() + 10.0)
    yield None


def _give_up(job: SaveJob, store: Store, error: BaseException) -> None:
    """Removes the attempt of a single rank; with several ranks, writes the reason for the others."""
    with contextlib.suppress(OSError, AllranksError):
        if len(job.ranks) == 1:
            store.abandon(job.attempt)
            return
        text = f"{type(error).__name__}: {error}".encode()
        name = part_file(store, job.attempt, job.rank, "failed")
        try:
            store.write(job.attempt, name, [memoryview(text)], len(text))
        except OSError as full:
            if full.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            store.write(job.attempt, name, [], 0)  # works even on a full disk
        if isinstance(store, KeyedStore) and store.tier == "PEER":
            _withdraw(job, store)
        if job.rank == job.ranks[0]:
            store.tidy()  # repeated failures would fill the disk


def _withdraw(job: SaveJob, store: KeyedStore) -> None:
    """Removes this rank's part from the peers' memory if no rank can commit it any more."""
    first = job.rank == job.ranks[0]
    if not first and store.staged(job.attempt, part_file(store, job.attempt, job.rank, "json")) is not None:
        failed = part_file(store, job.attempt, job.ranks[0], "failed")
        if store.staged(job.attempt, failed) is None:
            return  # the first rank may still commit it
    store.abandon(
        job.attempt, [part_file(store, job.attempt, job.rank, end) for end in ("safetensors", "json")]
    )
