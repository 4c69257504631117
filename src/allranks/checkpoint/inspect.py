"""Checkpoints without torch: list, verify every byte, copy between stores."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from allranks.checkpoint.checksum import cores, in_threads
from allranks.checkpoint.manifest import Index, Manifest, Part, StoredShard, encode_manifest, lay_out
from allranks.checkpoint.restore.opened_checkpoint import Opened, opened
from allranks.checkpoint.save.writer import data_file, part_file, write_index
from allranks.checkpoint.stores import Attempt, Store, reason_of
from allranks.errors import CheckpointDamaged, CheckpointValidationError

Progress = Callable[[int], None]  # bytes since the last call


@dataclass(frozen=True)
class Verified:
    """What `verify` found: `problems` is empty when every byte is what was written."""

    path: str
    step: int
    tensors: int
    bytes: int
    problems: tuple[str, ...]


def verify_checkpoint(store: Store, name: str, progress: Progress = lambda _: None) -> Verified:
    """Reads everything and compares every checksum; continues after the first problem."""
    try:
        with opened(store, name, progress) as checkpoint:
            return _verify(checkpoint)
    except CheckpointValidationError as error:
        return Verified(store.path_of(name), -1, 0, 0, (error.reason,))


def copy_checkpoint(
    source: Store, name: str, target: Store, new_name: str, progress: Progress = lambda _: None
) -> Manifest:
    """Copies a checkpoint, verified on the way."""
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
    """Bytes of all tensors."""
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

    in_threads(cores(), [one for one in enumerate(shards) if one[1][1].file not in bad], verify)
    problems = [*bad.values(), *(found[number] for number in sorted(found))]
    return Verified(
        checkpoint.path,
        checkpoint.manifest.step,
        len(shards),
        shard_bytes(checkpoint),
        tuple(dict.fromkeys(problems)),
    )


def _damaged_files(checkpoint: Opened) -> dict[str, str]:
    """Data file → what is wrong with its size or header; files of empty ranks have a header, too."""
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
            checkpoint.read_shard(index, places[placed.shard], view)
            yield view

    target.write(attempt, name, pieces(), layout.bytes)
    stored = tuple(StoredShard(p.shard, name, p.start, places[p.shard].checksum) for p in layout.placed)
    file = data_file(name, layout, index.algorithm)
    return write_index(target, attempt, replace(index, files=(file,), shards=stored))
