"""Files read by several processes. Children are forked, so that they start in a millisecond.

Rows come back through memory that parent and child share; everything else through a pipe. Each child interns into
tables of its own, which the parent merges: ranks of one job number alike, so that mostly no row has to be changed.
A child that dies or stalls leaves its share to the parent, which reads within a limit: a file system that gives
no answer costs the files on it, not the verdict.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from allranks.blackbox.reader import Arena
from allranks.blackbox.tables import Tables
from allranks.load.reading import TICK_S, Reader, Share, read_here
from allranks.load.sources import DumpSource, LoadOptions, Raw, Unreadable
from allranks.model.trace import CALL, Group

#: Rows take at most about this share of a file's bytes; what does not fit goes through the pipe.
ROWS_PER_BYTE = 1.3
#: The shared memory begins with the number of sources that the child has read.
_COUNT_BYTES = 64
#: How long a child that was killed may take to go; one that hangs in the kernel stays.
GONE_S = 1.0


@dataclass(frozen=True)
class _Child:
    """A process at work on some sources."""

    pid: int
    pipe: int
    memory: mmap.mmap
    sources: list[DumpSource]


def read_shares(options: LoadOptions, sources: list[DumpSource], count: int) -> Share:
    """Reads all sources with so many processes, this one included."""
    shares = [sources[i::count] for i in range(count)]
    show = options.progress or (lambda done, total: None)
    with _children(options, shares[1:]) as children:
        load = read_here(options, shares[0], lambda done: show(done * count, len(sources)))
        for child in children:
            if not (_has_answered(child, options.read_limit_s) and _collect(load, child)):
                rest = read_here(options, child.sources)
                tables = rest.reader.tables
                _adopt(load, rest.raws, rest.failed, (tables.names, tables.shapes, tables.stacks))
    return load


@contextmanager
def _children(options: LoadOptions, shares: list[list[DumpSource]]) -> Iterator[list[_Child]]:
    """Forks one child per share; whatever happens, none of them is left behind."""
    children: list[_Child] = []
    try:
        for sources in shares:
            children.append(_fork(options, sources))
        yield children
    finally:
        for child in children:
            _end(child)


def _fork(options: LoadOptions, sources: list[DumpSource]) -> _Child:
    memory = mmap.mmap(-1, int(sum(source.size for source in sources) * ROWS_PER_BYTE) + mmap.PAGESIZE)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # only our own thread exists: processes_for
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(options, sources, memory, writing)
    os.close(writing)
    return _Child(pid, reading, memory, sources)


def _work(options: LoadOptions, sources: list[DumpSource], memory: mmap.mmap, writing: int) -> None:
    """What the child does, from its start to its end."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        rows = _SharedRows(memory)
        share = Share(options, Reader(options, arena=rows.arena))
        for done, source in enumerate(sources, start=1):
            share.read(source)
            memory[:8] = done.to_bytes(8, "little")
            while rows.taken < len(share.raws):
                rows.take(share.raws[rows.taken][1])
        tables = share.reader.tables
        failed = [(source, str(error), error.kind, error.status) for source, error in share.failed]
        raws = [(replace(source, data=None), raw) for source, raw in share.raws]  # its bytes have been read
        answer = (rows.places, raws, failed, tables.names, tables.shapes, tables.stacks)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


class _SharedRows:
    """The rows of all traces in shared memory: black boxes are read into it, the rows of others put there."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._first = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        count = (len(memory) - _COUNT_BYTES) // CALL.itemsize
        self.arena = Arena(np.frombuffer(memory, CALL, count, _COUNT_BYTES))
        self._end = self._first + len(memory)
        self.taken = 0
        self.places: list[tuple[int, int] | None] = []  # (offset, rows); None: sent with the trace itself

    def take(self, raw: Raw) -> None:
        """Moves the rows of a trace, if they are not there yet and fit."""
        self.taken += 1
        rows = raw.calls
        if not self._holds(rows):
            rows = self.arena.take(len(rows))
            rows[:] = raw.calls
        if not self._holds(rows):
            self.places.append(None)
            return
        self.places.append((rows.__array_interface__["data"][0] - self._first, len(rows)))
        raw.calls = np.zeros(0, CALL)

    def _holds(self, rows: np.ndarray) -> bool:
        inside: bool = self._first < rows.__array_interface__["data"][0] < self._end
        return inside and rows.flags.c_contiguous


def _has_answered(child: _Child, limit_s: float) -> bool:
    """Whether the child's answer, or its end, has come: False when it read nothing for longer than the limit."""
    poll = select.poll()
    poll.register(child.pipe, select.POLLIN)
    done, since = b"", time.monotonic()
    while not poll.poll(1000 * TICK_S):
        count, now = child.memory[:8], time.monotonic()
        if count != done:
            done, since = count, now
        elif now - since > limit_s:
            return False
    return True


def _collect(load: Share, child: _Child) -> bool:
    """Takes over what a child has read; False when it died."""
    with os.fdopen(os.dup(child.pipe), "rb") as pipe:
        try:
            places, raws, failed, *tables = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            return False
    for (_, raw), place in zip(raws, places, strict=True):
        if place is not None:
            raw.calls = np.frombuffer(child.memory, CALL, place[1], place[0])
    notes = [
        (source, Unreadable(text, kind=kind, skip=status == "skipped", unopened=status == "unreadable"))
        for source, text, kind, status in failed
    ]
    _adopt(load, raws, notes, tables)
    return True


def _adopt(
    load: Share,
    raws: list[tuple[DumpSource, Raw]],
    failed: list[tuple[DumpSource, Unreadable]],
    tables: Sequence[Any],
) -> None:
    """Adds what was read with other tables (of names, sizes, stacks), its numbers changed to ours."""
    numbers = _merge(load.reader.tables, *tables)
    groups: dict[int, Group] = {}
    for _, raw in raws:
        for column, ids in numbers.items():
            raw.calls[column] = ids[raw.calls[column]]
        for group in raw.groups:  # within one child equal groups are one object already
            if id(group) not in groups:
                groups[id(group)] = load.reader.tables.group(group)
        raw.groups = tuple(groups[id(group)] for group in raw.groups)
    load.raws += raws
    load.failed += failed


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


def _end(child: _Child) -> None:
    """Waits for a child that has answered, and kills one that has not."""
    os.close(child.pipe)
    done, _ = os.waitpid(child.pid, os.WNOHANG)
    if done:
        return
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while not os.waitpid(child.pid, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.001)
