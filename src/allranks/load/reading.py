"""One source → Raw or a note, by its content and never by its name alone; then all of them, archives included.

A read from a dead NFS server cannot be interrupted: it is done in a thread, which is left behind after a limit. What comes
out is settled in `loading.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from allranks.blackbox.header import MAGIC
from allranks.blackbox.reader import Arena, BytesFile, File, OpenFile, read_box
from allranks.blackbox.tables import HeapCache, Tables
from allranks.errors import InputError
from allranks.load.sources import (
    GZIP,
    ZSTD,
    DumpSource,
    LoadOptions,
    Raw,
    Unreadable,
    has_archive_name,
    open_archive,
    read_all,
    unwrap,
)
from allranks.model.parsing import kind_of_capture

if TYPE_CHECKING:  # a thousand lines that black boxes do not need
    from allranks.load.torch_dump import DumpReader

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
        from allranks.load.torch_dump import DumpReader

        return DumpReader(self.tables)

    def read(self, source: DumpSource) -> Raw:
        """The content of one file. Raises Unreadable, with the note as its message."""
        if source.problem:
            foreign = source.problem == "not a regular file"
            raise Unreadable(source.problem, skip=foreign, unopened=source.unopened)
        try:
            return self._read(source)
        except OSError as error:
            raise Unreadable(str(error.strerror or error), unopened=True) from error

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
        if head[:1] != b"\x80" and not head.startswith((GZIP, ZSTD)) and head.lstrip()[:1] != b"{":
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


def _empty(path: str) -> Unreadable:
    """An empty log is not damaged; an empty dump is."""
    is_log = path.endswith((".log", ".out", ".err", ".txt"))
    return Unreadable("empty file", kind="text", skip=True) if is_log else Unreadable("empty file")


def _foreign(path: str, head: bytes) -> Unreadable:
    """What a file is that we do not read."""
    name = os.path.basename(path)
    if ".pyspy" in name or ".proc." in name or name.endswith(".progress.jsonl") or kind_of_capture(head):
        return Unreadable("a stack capture: `allranks stacks` reads it", kind="stacks", skip=True)
    kinds = ((b"\x7fELF", "ELF core or program"), (b"PK\x03\x04", "zip archive"), (b"#!", "script"))
    for magic, kind in kinds:
        if head.startswith(magic):
            return Unreadable("not a dump", kind=kind, skip=True)
    text = all(byte >= 32 or byte in b"\t\r\n\x1b" for byte in head[:256])
    return Unreadable("not a dump", kind="text" if text else "unknown", skip=True)


T = TypeVar("T")
#: How often progress is shown and looked at, in seconds.
TICK_S = 0.1


#: So many members of an archive are read while none of them is a dump.
MAX_FOREIGN = 10_000
#: So many files may give no answer before the rest is left alone.
MAX_STALLS = 3


@dataclass
class Share:
    """Some of the files, and what became of them."""

    options: LoadOptions
    reader: Reader
    raws: list[tuple[DumpSource, Raw]] = field(default_factory=list)
    failed: list[tuple[DumpSource, Unreadable]] = field(default_factory=list)

    def read(self, source: DumpSource) -> None:
        """Reads one source, looking into archives."""
        try:
            members = self._members(source)
            if members is not None:
                self._read_members(source, members)
                return
        except Unreadable as error:
            self.failed.append((source, error))
            return
        self.read_member(source)

    def _read_members(self, archive: DumpSource, members: Iterable[DumpSource]) -> None:
        before = len(self.raws)
        for number, member in enumerate(members):
            if number >= MAX_FOREIGN and len(self.raws) == before:
                note = f"none of its first {MAX_FOREIGN:,} members is a dump: the others were not read"
                self.failed.append((archive, Unreadable(note, kind="tar archive")))
                return
            self.read_member(member)

    def read_member(self, source: DumpSource) -> None:
        """Reads one source that is not an archive."""
        try:
            self.raws.append((source, self.reader.read(source)))
        except Unreadable as error:
            self.failed.append((source, error))

    def _members(self, source: DumpSource) -> Iterable[DumpSource] | None:
        """The members of a tar file, compressed or not, or of a zip file; None when the source is none."""
        if source.problem or not has_archive_name(source.path):
            return None
        try:
            members, problem = open_archive(source, self.options)
        except OSError as error:
            raise Unreadable(str(error.strerror or error), unopened=True) from error
        if problem and members is not None:
            self.failed.append((source, Unreadable(problem, kind="tar archive")))
        return members


def read_here(
    options: LoadOptions, sources: list[DumpSource], show: Callable[[int], None] | None = None
) -> Share:
    """Reads sources. Those that give no answer are noted, and the others read again without them."""
    silent: list[tuple[DumpSource, Unreadable]] = []
    for _ in range(MAX_STALLS + 1):
        load = Share(options, Reader(options))
        read, all_of_them = take_within(map(load.read, sources), options.read_limit_s, show)
        if all_of_them:
            break
        left = sources[len(read)]
        silent.append((left, Unreadable(f"no answer within {options.read_limit_s:g} s", unopened=True)))
        if len(silent) < MAX_STALLS:
            sources = [source for source in sources if source is not left]
            continue
        note = f"not tried, since {MAX_STALLS} other files gave no answer"
        silent += [(source, Unreadable(note, unopened=True)) for source in sources[len(read) + 1 :]]
        sources = sources[: len(read)]
    load.failed += silent
    return load


class _Taking(threading.Thread, Generic[T]):
    """Takes one step after the other until the last, or for ever."""

    def __init__(self, steps: Iterable[T]) -> None:
        super().__init__(name="allranks-load", daemon=True)
        self._steps = steps
        self.taken: list[T] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Collects what the steps give."""
        try:
            for item in self._steps:
                self.taken.append(item)
        except BaseException as error:  # raised again by the waiting thread
            self.error = error
        finally:
            self.ended.set()


def take_within(
    steps: Iterable[T], limit_s: float, show: Callable[[int], None] | None = None
) -> tuple[list[T], bool]:
    """(what the steps gave, whether all were taken): gives up when one step takes longer than the limit. What the
    thread that is left behind works on must not be used by anybody else afterwards."""
    taking = _Taking(steps)
    taking.start()
    done, since, cpu = 0, time.monotonic(), time.process_time()
    while not taking.ended.wait(TICK_S):
        count, now = len(taking.taken), time.monotonic()
        if count > done or time.process_time() - cpu > TICK_S / 2:  # a large file is work, not a wait
            done, since = count, now
            if show is not None:
                show(count)
        elif now - since > limit_s:
            return taking.taken[:count], False
        cpu = time.process_time()
    taking.join()
    if taking.error is not None:
        raise taking.error
    return taking.taken, True
