"""Phases of a rank other than training steps, marked in its black box: saving, restoring, healing, evaluation.

The marks form a small ring in the unused half of the header page, which an agent reads together with the header. So phases
that are shorter than the agent's sampling interval are not lost. `during("saving")` does nothing without a recorder.
"""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from allranks.blackbox.file_writer import Box

OFFSET, SLOTS = 2048, 48  # of the header page
_ENTRY = struct.Struct("<16sqq")
_COUNT = struct.Struct("<q")
FIRST = "first step"  # from the first progress mark of a process to its second
GC, GC_NS = "gc", 10_000_000  # a garbage collection, and the shortest one that is marked


class PhaseMark(NamedTuple):
    """One phase, in epoch nanoseconds. `end_ns` is 0 until it ends."""

    name: str
    begin_ns: int
    end_ns: int


class _Marks:
    """The state of this process. `box` is None if nothing is recorded."""

    box: Box | None = None
    pid = 0
    lock = threading.Lock()
    collecting_ns = 0


def attach(box: Box | None) -> None:
    """Writes the phases of this process into this box from now on."""
    _Marks.box, _Marks.pid, _Marks.lock = box, os.getpid(), threading.Lock()
    if _collected in gc.callbacks:
        gc.callbacks.remove(_collected)
    if box is not None:
        gc.callbacks.append(_collected)


def _collected(phase: str, info: dict[str, int]) -> None:
    """Marks a slow full collection. Does not wait for the lock: this thread may hold it."""
    if info["generation"] < 2:
        return
    now = time.time_ns()
    if phase == "start":
        _Marks.collecting_ns = now
    elif now - _Marks.collecting_ns >= GC_NS and _Marks.lock.acquire(blocking=False):
        try:
            _mark(GC, _Marks.collecting_ns, now)
        finally:
            _Marks.lock.release()


def begin(name: str) -> int:
    """Marks the beginning of a phase and returns its number; 0 without a recorder."""
    if _Marks.box is None or os.getpid() != _Marks.pid:
        return 0
    with _Marks.lock:
        return _mark(name, time.time_ns(), 0)


def _mark(name: str, begin_ns: int, end_ns: int) -> int:
    """Writes a mark. Called under the lock."""
    box = _Marks.box
    if box is None or os.getpid() != _Marks.pid:
        return 0
    with suppress(ValueError):  # the box was closed meanwhile
        memory = box.memory
        number = int(_COUNT.unpack_from(memory, OFFSET)[0]) + 1
        at = _offset(number)
        struct.pack_into("<q", memory, at + 16, 0)  # readers skip an entry while it is written
        memory[at : at + 16] = name.encode("utf-8", "replace")[:16].ljust(16, b"\0")
        struct.pack_into("<q", memory, at + 24, end_ns)
        struct.pack_into("<q", memory, at + 16, begin_ns)
        _COUNT.pack_into(memory, OFFSET, number)
        return number
    return 0


def end(number: int) -> None:
    """Marks the end of the phase with this number."""
    box = _Marks.box
    if not number or box is None or os.getpid() != _Marks.pid:
        return
    with _Marks.lock, suppress(ValueError):
        if number > _COUNT.unpack_from(box.memory, OFFSET)[0] - SLOTS:
            struct.pack_into("<q", box.memory, _offset(number) + 24, time.time_ns())


@contextmanager
def during(name: str) -> Iterator[None]:
    """Marks the block as a phase."""
    number = begin(name)
    try:
        yield
    finally:
        end(number)


def _offset(number: int) -> int:
    return OFFSET + 8 + (number - 1) % SLOTS * _ENTRY.size


def read_phases(page: bytes) -> tuple[PhaseMark, ...]:
    """The newest phases in the header page of a box, oldest first."""
    if len(page) < OFFSET + 8 + SLOTS * _ENTRY.size:
        return ()
    number = _COUNT.unpack_from(page, OFFSET)[0]
    if number <= 0:
        return ()
    found = []
    for one in range(max(1, number - SLOTS + 1), number + 1):
        name, begin_ns, end_ns = _ENTRY.unpack_from(page, _offset(one))
        if begin_ns > 0:
            found.append(PhaseMark(name.rstrip(b"\0").decode("utf-8", "replace"), begin_ns, end_ns))
    return tuple(found)
