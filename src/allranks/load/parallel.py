"""Files read by several processes, where that pays. Children are forked, so that they start in a millisecond.

Rows come back through memory that parent and child share; everything else through a pipe. Each child interns into
tables of its own, which the parent merges: ranks of one job number alike, so that mostly no row has to be changed.
A child that dies leaves its share to the parent.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from allranks.load.reading import Reader
from allranks.load.result import Raw, Unreadable
from allranks.load.share import Share
from allranks.load.sources import Source
from allranks.load.tables import Tables
from allranks.model.trace import CALL, Group

#: Below these a second process costs more than it saves.
MIN_FILES, MIN_BYTES = 128, 24 << 20
MAX_PROCESSES = 8
#: Rows take at most about this share of a file's bytes; what does not fit goes through the pipe.
ROWS_PER_BYTE = 1.3


@dataclass(frozen=True)
class _Child:
    """A process at work on some sources."""

    pid: int
    pipe: int
    memory: mmap.mmap
    sources: list[Source]


def read_all_shares(load: Share, sources: list[Source]) -> None:
    """Reads all sources into `load`, with as many processes as pay."""
    count = processes_for(sources)
    shares = [sources[i::count] for i in range(count)]
    with _children(load, shares[1:]) as children:
        _read_here(load, shares[0], len(sources))
        for child in children:
            _collect(load, child)
    if load.options.progress:
        load.options.progress(len(sources), len(sources))


def processes_for(sources: list[Source]) -> int:
    """How many processes pay for these sources; 1 where forking would be unsafe."""
    if len(sources) < MIN_FILES or sum(source.size for source in sources) < MIN_BYTES:
        return 1
    if threading.active_count() > 1 or not hasattr(os, "fork"):
        return 1
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(sources) // (MIN_FILES // 2)))


def _read_here(load: Share, sources: list[Source], total: int) -> None:
    """Reads one share in this process; progress counts for all of them."""
    progress = load.options.progress
    for done, source in enumerate(sources):
        if progress and done % 16 == 0:
            progress(done * total // len(sources), total)
        load.read(source)


@contextmanager
def _children(load: Share, shares: list[list[Source]]) -> Iterator[list[_Child]]:
    """Forks one child per share; whatever happens, none of them is left behind."""
    children: list[_Child] = []
    try:
        for sources in shares:
            children.append(_fork(load, sources))
        yield children
    finally:
        for child in children:
            _end(child)


def _fork(load: Share, sources: list[Source]) -> _Child:
    memory = mmap.mmap(-1, int(sum(source.size for source in sources) * ROWS_PER_BYTE) + mmap.PAGESIZE)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # only our own thread exists; see processes_for
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(load, sources, memory, writing)
    os.close(writing)
    return _Child(pid, reading, memory, sources)


def _work(load: Share, sources: list[Source], memory: mmap.mmap, writing: int) -> None:
    """The child's whole life."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        share = Share(load.options, Reader(load.options))
        rows = _SharedRows(memory)
        for source in sources:
            share.read(source)
            while rows.taken < len(share.raws):
                rows.take(share.raws[rows.taken][1])
        tables = share.reader.tables
        failed = [(source, str(error), error.kind, error.skip) for source, error in share.failed]
        raws = [(_light(source), raw) for source, raw in share.raws]
        answer = (rows.places, raws, failed, tables.names, tables.shapes, tables.stacks)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


def _light(source: Source) -> Source:
    """The source without its bytes, which have been read."""
    return Source(source.path, source.location, source.mtime_ns, source.size)


class _SharedRows:
    """Puts the rows of one trace after the other into shared memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._buffer = np.frombuffer(memory, np.uint8)
        self._used = 0
        self.taken = 0
        self.places: list[tuple[int, int] | None] = []  # (offset, rows); None: sent with the trace itself

    def take(self, raw: Raw) -> None:
        """Moves the rows of a trace, if they fit."""
        self.taken += 1
        size = raw.calls.nbytes
        if self._used + size > len(self._buffer):
            self.places.append(None)
            return
        self._buffer[self._used : self._used + size] = np.ascontiguousarray(raw.calls).view(np.uint8)
        self.places.append((self._used, len(raw.calls)))
        self._used += size
        raw.calls = np.zeros(0, CALL)


def _collect(load: Share, child: _Child) -> None:
    """Takes over what a child has read, or reads its share here when the child died."""
    with os.fdopen(os.dup(child.pipe), "rb") as pipe:
        try:
            places, raws, failed, names, shapes, stacks = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            for source in child.sources:
                load.read(source)
            return
    numbers = _merge(load.reader.tables, names, shapes, stacks)
    groups: dict[int, Group] = {}
    for (source, raw), place in zip(raws, places, strict=True):
        if place is not None:
            raw.calls = np.frombuffer(child.memory, CALL, place[1], place[0])
        _renumber(raw.calls, numbers)
        raw.groups = tuple(_same_group(load.reader.tables, group, groups) for group in raw.groups)
        load.raws.append((source, raw))
    load.failed += [(source, Unreadable(text, kind=kind, skip=skip)) for source, text, kind, skip in failed]


def _merge(
    tables: Tables, names: list[str], shapes: list[object], stacks: list[tuple[object, ...]]
) -> dict[str, np.ndarray]:
    """Column → the parent's number of each of the child's; columns whose numbers agree are left out."""
    name = [tables.name(text) for text in names]
    shape = [tables.shape(value) for value in shapes]  # type: ignore[arg-type]
    stack = [
        tables.stack(tuple(tables.frame(frame.name, frame.file, frame.line) for frame in frames))  # type: ignore[attr-defined]
        for frames in stacks
    ]
    numbers = {"op": name, "label": name, "shapes": shape, "stack": stack}
    return {
        column: np.array(ids, np.uint32) for column, ids in numbers.items() if ids != list(range(len(ids)))
    }


def _renumber(calls: np.ndarray, numbers: dict[str, np.ndarray]) -> None:
    for column, ids in numbers.items():
        calls[column] = ids[calls[column]]


def _same_group(tables: Tables, group: Group, known: dict[int, Group]) -> Group:
    """The parent's object for an equal group. Within one child equal groups are one object already."""
    found = known.get(id(group))
    if found is None:
        found = known[id(group)] = tables.group(group)
        known[id(found)] = found
    return found


def _end(child: _Child) -> None:
    """Waits for a child that has answered, and kills one that has not."""
    os.close(child.pipe)
    done, _ = os.waitpid(child.pid, os.WNOHANG)
    if not done:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
