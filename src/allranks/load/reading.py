"""One source → Raw or a note, by its content and never by its name alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from allranks.blackbox.header import MAGIC
from allranks.blackbox.reader import read_box
from allranks.blackbox.ring_copy import Arena, BytesFile, File, OpenFile
from allranks.blackbox.tables import HeapCache, Tables
from allranks.errors import InputError
from allranks.load.result import LoadOptions, Raw, Unreadable
from allranks.load.sources import GZIP, ZSTD, DumpSource, read_all, unwrap

if TYPE_CHECKING:  # a thousand lines that black boxes do not need
    from allranks.load.dumps import DumpReader

HEAD_BYTES = 512


@dataclass
class Reader:
    """What is shared between the files of one load."""

    options: LoadOptions
    tables: Tables = field(default_factory=Tables)
    arena: Arena = field(default_factory=Arena)

    @cached_property
    def heap(self) -> HeapCache:
        """What the heaps of black boxes share."""
        return HeapCache(self.tables)

    @cached_property
    def dumps(self) -> DumpReader:
        """What dumps share."""
        from allranks.load.dumps import DumpReader

        return DumpReader(self.tables)

    def read(self, source: DumpSource) -> Raw:
        """The content of one file. Raises Unreadable, with the note as its message."""
        if source.problem:
            raise Unreadable(source.problem, skip=source.problem == "not a regular file")
        try:
            return self._read(source)
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror or error}") from error

    def _read(self, source: DumpSource) -> Raw:
        if source.data is not None:
            return self._read_known(source, source.data[:HEAD_BYTES])
        fd = os.open(source.location, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = os.pread(fd, HEAD_BYTES, 0)
            if head.startswith(MAGIC):
                return self._read_box(OpenFile(fd, self.arena))
        finally:
            os.close(fd)
        return self._read_known(source, head)

    def _read_box(self, file: File) -> Raw:
        try:
            return read_box(file, self.heap, self.options.max_box_bytes, self.options.newest_calls)
        except InputError as error:
            raise Unreadable(str(error), kind="black box") from error

    def _read_known(self, source: DumpSource, head: bytes) -> Raw:
        """Reads a source whose first bytes are known."""
        if not head:
            raise _empty(source.path)
        if head.startswith(MAGIC) and source.data is not None:
            return self._read_box(BytesFile(source.data))
        if not _promising(head):
            raise _foreign(source.path, head)
        return self.read_bytes(source.path, read_all(source, self.options.max_file_bytes))

    def read_bytes(self, path: str, data: bytes) -> Raw:
        """The content of a file that is in memory; compressed bytes are unwrapped first."""
        data, problem = unwrap(data, self.options.max_file_bytes)
        try:
            raw = self._read_plain(path, data)
        except Unreadable as error:
            if problem:
                raise Unreadable(problem, kind=error.kind) from error
            raise
        if problem:
            raw.damaged = True
            raw.notes = (problem, *raw.notes)
        return raw

    def _read_plain(self, path: str, data: bytes) -> Raw:
        if data.startswith(MAGIC):
            return self._read_box(BytesFile(data))
        if data[:1] == b"\x80":
            return self.dumps.read_pickle(data)
        if data.lstrip()[:1] == b"{":
            return self.dumps.read_json(data)
        raise _foreign(path, data) if data else _empty(path)


def _promising(head: bytes) -> bool:
    """Whether the first bytes can begin anything that we read."""
    return head[:1] == b"\x80" or head.startswith((GZIP, ZSTD)) or head.lstrip()[:1] == b"{"


def _is_traceback(head: bytes) -> bool:
    """Whether this is what faulthandler writes."""
    return b"(most recent call first)" in head and head.lstrip().startswith(
        (b"Thread 0x", b"Current thread 0x")
    )


def _empty(path: str) -> Unreadable:
    """A log without a line is no damage; a dump that is empty is."""
    is_log = path.endswith((".log", ".out", ".err", ".txt"))
    return Unreadable("empty file", kind="text", skip=True) if is_log else Unreadable("empty file")


def _foreign(path: str, head: bytes) -> Unreadable:
    """What a file is that we do not read."""
    name = os.path.basename(path)
    if ".pyspy" in name or ".proc." in name or name.endswith(".progress.jsonl") or _is_traceback(head):
        return Unreadable("a stack capture: `allranks stacks` reads it", kind="stacks", skip=True)
    kinds = ((b"\x7fELF", "ELF core or program"), (b"PK\x03\x04", "zip archive"), (b"#!", "script"))
    for magic, kind in kinds:
        if head.startswith(magic):
            return Unreadable("not a dump", kind=kind, skip=True)
    text = all(byte >= 32 or byte in b"\t\r\n\x1b" for byte in head[:256])
    return Unreadable("not a dump", kind="text" if text else "unknown", skip=True)
