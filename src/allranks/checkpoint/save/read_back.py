"""Reads a data file back after it was written and compares it, byte for byte, with what was meant. Torch-free.

Runs where the file was written, before the checkpoint is committed: a disk that stored something else is found out
while the state is still in memory, and the save can be repeated.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allranks.checkpoint.checksum import READ_BYTES, Sums, again
from allranks.checkpoint.manifest import DataFile, StoredShard
from allranks.checkpoint.parallel import cores, in_threads
from allranks.checkpoint.stores.store import Source

#: Neighbouring segments are read together up to this size, and from a store where a read is a request at once.
RUN_BYTES = 16 << 20


@dataclass(frozen=True)
class Segment:
    """A stretch of a file and the checksum it must have."""

    what: str
    start: int
    bytes: int
    checksum: str


def read_back(source: Source, file: DataFile, stored: Sequence[StoredShard], algorithm: str) -> None:
    """Raises OSError (EIO) that names the first stretch which is not what was written."""
    header = Segment("its header", 0, file.header_bytes, file.header_checksum)
    shards = [
        Segment(one.shard.name, one.start, one.shard.bytes, one.checksum)
        for one in stored
        if one.file == file.file
    ]
    segments = [header, *sorted(shards, key=lambda segment: segment.start)]
    if source.bytes != file.bytes:
        raise _differs(file, f"it has {source.bytes} bytes instead of {file.bytes}")
    in_threads(cores(), _runs(segments), lambda: _checker(source, file, algorithm))


def _checker(source: Source, file: DataFile, algorithm: str) -> Callable[[list[Segment]], None]:
    scratch = memoryview(bytearray(RUN_BYTES if source.wide_reads else READ_BYTES))

    def check(run: list[Segment]) -> None:
        sums = Sums([(algorithm, segment.bytes) for segment in run])
        at, length = run[0].start, sum(segment.bytes for segment in run)
        for piece in again(scratch, length):
            source.read_into(at, piece)
            sums.update(piece)
            at += len(piece)
        for segment, found in zip(run, sums.digests(), strict=True):
            if found != segment.checksum:
                raise _differs(file, f"{segment.what} at byte {segment.start}")

    return check


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments lie without gaps; a run holds as many as fit, at least one."""
    runs: list[list[Segment]] = []
    length = RUN_BYTES
    for segment in segments:
        if length + segment.bytes > RUN_BYTES:
            runs.append([])
            length = 0
        runs[-1].append(segment)
        length += segment.bytes
    return runs


def _differs(file: DataFile, what: str) -> OSError:
    return OSError(errno.EIO, f"{file.file} read back is not what was written: {what}")
