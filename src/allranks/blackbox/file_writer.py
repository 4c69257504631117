"""Writes black box files (layout: blackbox/layout.py). No torch.

`Box` creates the file and writes its header and heap; `recording/_fast.c` writes the rows. The file is a shared mapping, so
its content survives any death of the process.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
from pathlib import Path

from allranks.blackbox.files import make_folder, reserve_file
from allranks.blackbox.header import CLOSED_BYTES, EXIT_MESSAGE_BYTES, HEADER_BYTES, MAGIC, VERSION, shorten
from allranks.blackbox.layout import HEADER, ITEM_HEADER_BYTES, Item, ring_bytes
from allranks.model.trace import CALL

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
        """Creates and maps the file; OSError without space or permission."""
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

    def set_floats(self, **fields: float) -> None:
        for name, value in fields.items():
            struct.pack_into("<d", self.memory, 8 * FIELD[name], value)

    def get(self, field: str) -> int:
        return int(self.words[FIELD[field]])

    def mark_closed(self, how: str, now_ns: int) -> None:
        """Marks the box as closed; the first reason is kept."""
        if self.words[FIELD["closed_ns"]] == 0:
            # the text comes before the time, because an agent may read in between
            for field, size in (("exit_message", EXIT_MESSAGE_BYTES), ("closed", CLOSED_BYTES)):
                offset = HEADER.fields[field][1]  # type: ignore[index]
                self.memory[offset : offset + size] = shorten(how, size - 1).ljust(size, b"\0")
            self.words[FIELD["closed_ns"]] = now_ns

    def intern(self, kind: Item, payload: object) -> int:
        """The id of a payload, which is appended to the heap if it is new; 0 if the heap is full."""
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
        if (known := self._items.get((kind, text))) is not None:
            return known
        with self._heap_lock:
            known = self._items.get((kind, text))
            if known is None:
                known = self._append(kind, text)
            return known

    def append(self, kind: Item, payload: object) -> int:
        """Appends an item even if an equal one exists, such as a new group with an old name."""
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
        with self._heap_lock:
            return self._append(kind, text)

    def _append(self, kind: Item, text: str) -> int:
        """Called under the lock. A signal handler in the same thread can enter again and gets id 0."""
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
        """Unmaps the file, which stays on disk."""
        self.words.release()
        self.memory.close()
