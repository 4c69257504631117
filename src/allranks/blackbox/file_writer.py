"""Writes black box files (layout: blackbox/layout.py). No torch.

`Box` is the rank's own. Every store is plain memory in a shared mapping: the kernel keeps it when the process dies in any way.
It makes the box and fills its header and heap; the rows are written by `recording/row_writer.py` or `_fast.c`.

`box_bytes` makes a finished box of a RankTrace in one go, for conversion and for test data.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from allranks.blackbox.files import make_folder, reserve_file
from allranks.blackbox.header import CLOSED_BYTES, EXIT_MESSAGE_BYTES, HEADER_BYTES, MAGIC, VERSION, shorten
from allranks.blackbox.layout import HEADER, ITEM_HEADER_BYTES, Item, packed_ranks, ring_bytes
from allranks.model.trace import CALL, RankTrace

#: Index of an eight-byte header field in `Box.words`.
FIELD = {name: HEADER.fields[name][1] // 8 for name in HEADER.names or () if HEADER.fields is not None}


class Box:
    """One open black box: `words` are its aligned eight-byte words, `rows` the mapping itself."""

    def __init__(self, path: Path, capacity: int, heap_bytes: int) -> None:
        self.path = path
        self.capacity = capacity
        self.heap_bytes = heap_bytes
        self.heap_offset = HEADER_BYTES + ring_bytes(capacity)
        self.memory: mmap.mmap
        self.words: memoryview
        self._items: dict[tuple[int, str], int] = {}
        self._ids = {kind: itertools.count(1) for kind in Item}
        self._heap_lock = threading.RLock()
        self._heap_used = 0
        self._appending = False

    def open(self) -> None:
        """Makes and maps the file; OSError when there is no room or no permission."""
        make_folder(self.path.parent)
        size = self.heap_offset + self.heap_bytes
        fd = reserve_file(self.path, size)
        try:
            self.memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.words = memoryview(self.memory).cast("q")
        self.set(capacity=self.capacity, heap_offset=self.heap_offset, heap_bytes=self.heap_bytes)
        self.set(rank=-1, world_size=-1, local_rank=-1, step=-1)
        struct.pack_into("<II", self.memory, 8, VERSION, CALL.itemsize)
        self.memory[0:8] = MAGIC  # last: a file without it is not a black box yet

    def set(self, **fields: int) -> None:
        for name, value in fields.items():
            self.words[FIELD[name]] = value

    def set_loss(self, loss: float) -> None:
        struct.pack_into("<d", self.memory, 8 * FIELD["loss"], loss)

    def get(self, field: str) -> int:
        return int(self.words[FIELD[field]])

    def mark_closed(self, how: str, now_ns: int) -> None:
        """Marks the box as closed on purpose; the first reason is kept."""
        if self.words[FIELD["closed_ns"]] == 0:
            # the whole text first: an agent may read in between
            for field, size in (("exit_message", EXIT_MESSAGE_BYTES), ("closed", CLOSED_BYTES)):
                offset = HEADER.fields[field][1]  # type: ignore[index]
                self.memory[offset : offset + size] = shorten(how, size - 1).ljust(size, b"\0")
            self.words[FIELD["closed_ns"]] = now_ns

    def intern(self, kind: Item, payload: object) -> int:
        """The id of this payload, appended to the heap when it is new; 0 when the heap is full."""
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
        if (known := self._items.get((kind, text))) is not None:
            return known
        with self._heap_lock:
            known = self._items.get((kind, text))
            if known is None:
                known = self._append(kind, text)
            return known

    def append(self, kind: Item, payload: object) -> int:
        """Appends an item even when an equal one exists (a new group of an old name, newer facts)."""
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
        with self._heap_lock:
            return self._append(kind, text)

    def _append(self, kind: Item, text: str) -> int:
        """Called under the lock, which lets a signal handler of the same thread in: that one gets id 0."""
        if self._appending:
            return 0
        self._appending = True
        try:
            payload = text.encode("utf-8", errors="replace")
            start = self.heap_offset + self._heap_used
            size = (ITEM_HEADER_BYTES + len(payload) + 7) & ~7
            if self._heap_used + size > self.heap_bytes:
                self.words[FIELD["heap_full"]] = 1
                return 0
            number = next(self._ids[kind])
            struct.pack_into("<IHHI", self.memory, start, len(payload), int(kind), 0, number)
            self.memory[start + ITEM_HEADER_BYTES : start + ITEM_HEADER_BYTES + len(payload)] = payload
            self._heap_used += size
            self.words[FIELD["heap_used"]] = self._heap_used
            self._items[(kind, text)] = number
            return number
        finally:
            self._appending = False

    def close(self) -> None:
        """Unmaps the file; it stays on disk."""
        self.words.release()
        self.memory.close()


class _Heap:
    """Items as they will stand in the file; ids count from 1 per kind."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._ids: dict[tuple[Item, bytes], int] = {}
        self._counts: dict[Item, int] = {}

    def add(self, kind: Item, value: object) -> int:
        """The id of an item, which is written the first time."""
        payload = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        found = self._ids.get((kind, payload))
        if found is None:
            found = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._ids[kind, payload] = found
            self.data += struct.pack("<IHHI", len(payload), kind, 0, found) + payload
            self.data += bytes(-len(self.data) % 8)
        return found


def box_bytes(trace: RankTrace) -> bytes:
    """The black box that holds this trace. The ring is exactly as long as the calls."""
    header, heap = trace.header, _Heap()
    meta = {name: getattr(header, name) for name in ("host", "job", "backend")}
    met = {name: list(vars(getattr(header, name)).values()) for name in ("rendezvous", "launched")}
    met["first_error"] = list(trace.progress.first_error)
    heap.add(Item.META, {**meta, **met, "versions": dict(header.versions)})
    calls = trace.calls.copy()
    groups = [0] + [
        heap.add(Item.GROUP, [g.name, g.desc, packed_ranks(g.ranks), g.backend]) for g in trace.groups[1:]
    ]
    calls["group"] = np.array(groups, np.uint32)[calls["group"]]
    for column in ("op", "label"):
        _renumber(calls, column, lambda index: heap.add(Item.NAME, trace.names[index]))
    _renumber(calls, "shapes", lambda index: heap.add(Item.SHAPES, list(vars(trace.shapes[index]).values())))
    stacks = [[[frame.name, frame.file, frame.line] for frame in stack] for stack in trace.stacks]
    _renumber(calls, "stack", lambda index: heap.add(Item.STACK, stacks[index]))
    for thread, name in trace.threads.items():
        heap.add(Item.THREAD, [thread, name])
    for index, when in trace.destroyed.items():
        heap.add(Item.DESTROYED, [groups[index], when])
    inside = heap.add(Item.NAME, trace.progress.inside) if trace.progress.inside else 0
    phase = heap.add(Item.NAME, trace.progress.phase) if trace.progress.phase else 0
    ring = _ring(calls)
    head = _header(trace, ring, len(heap.data), (phase, inside)).tobytes()
    return head.ljust(HEADER_BYTES, b"\0") + ring.tobytes() + heap.data


def _renumber(calls: np.ndarray, column: str, number: Callable[[int], int]) -> None:
    """Replaces table indices by heap ids; 0 stays none."""
    used, inverse = np.unique(calls[column], return_inverse=True)
    ids = [number(int(index)) if index else 0 for index in used]
    calls[column] = np.array(ids, np.uint32)[inverse]


def _ring(calls: np.ndarray) -> np.ndarray:
    """Every record in its slot: id modulo capacity. Gaps in the ids leave slots empty."""
    if not len(calls):
        return np.zeros(1, CALL)
    span = int(calls["begin"].max() - calls["begin"].min()) + 1
    capacity = min(span, 4 * len(calls) + 64)
    if span > capacity:  # a filtered dump with large gaps: number the records anew
        calls["begin"] = calls["end"] = np.arange(1, len(calls) + 1)
        capacity = len(calls)
    ring = np.zeros(capacity, CALL)
    ring[((calls["begin"] - 1) % np.uint64(capacity)).astype(np.int64)] = calls
    return ring


def _header(trace: RankTrace, ring: np.ndarray, heap_bytes: int, names: tuple[int, int]) -> np.ndarray:
    source, progress = trace.header, trace.progress
    head = np.zeros(1, HEADER)
    values = {
        "magic": MAGIC,
        "version": VERSION,
        "record_bytes": CALL.itemsize,
        "capacity": len(ring),
        "heap_offset": HEADER_BYTES + ring.nbytes,
        "heap_bytes": heap_bytes,
        "heap_used": heap_bytes,
        "next_id": int(ring["begin"].max()),
        "rank": -1 if source.rank is None else source.rank,
        "world_size": source.world_size or 0,
        "local_rank": -1,
        "attempt": source.attempt,
        "pid": source.pid,
        "start_ns": source.start_ns,
        "step": progress.step,
        "step_ns": progress.step_ns,
        "calls_started": progress.calls_started,
        "calls_completed": progress.calls_completed,
        "last_call_ns": max(int(ring["created_ns"].max()), int(ring["completed_ns"].max())),
        "expect_until_ns": progress.expect_until_ns,
        "phase": names[0],
        "inside": names[1],
        "inside_ns": progress.inside_ns,
        "setups": progress.setups,
        "closed_ns": source.written_ns if progress.closed else 0,
        "closed": shorten(progress.closed, CLOSED_BYTES - 1),
        "exit_message": shorten(progress.closed, EXIT_MESSAGE_BYTES - 1),
    }
    for name, value in values.items():
        head[name] = value
    return head
