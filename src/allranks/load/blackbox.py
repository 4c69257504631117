"""Black box files → Raw: one read of the ring, one of the used heap. Works on live, dead and cut files.

The heap of every rank of a job holds nearly the same items, so items are decoded once per load and found again
by their bytes. A ring that is being written is copied, then its `begin` column is read again: rows that changed
meanwhile are skipped and counted as torn.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from allranks.load.groups import MAX_MEMBERS
from allranks.load.result import Raw, Unreadable
from allranks.load.tables import MAX_TEXT, Tables
from allranks.model.blackbox import HEADER, HEADER_BYTES, ITEM_HEADER_BYTES, MAGIC, VERSION, Item, whole_rows
from allranks.model.trace import CALL, REDUCE_OPS, Group, Progress, Shapes, State, TraceHeader

_item_header = struct.Struct("<IHHI").unpack_from
MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
LAG = 64
_LAST_KIND = int(max(Item))
#: How often a ring is copied at most.
LOOKS = 5


@dataclass
class HeapCache:
    """Heap items by their bytes, over all files of one load."""

    tables: Tables
    items: dict[bytes, Any] = field(default_factory=dict)

    def find(self, kind: int, payload: bytes) -> Any:
        """The decoded item: an index into the tables, a Group, or the meta dictionary; None when unreadable."""
        if kind > _LAST_KIND:
            return None
        key = payload + bytes((kind,))
        if key in self.items:
            return self.items[key]
        try:
            value = _decode(self.tables, kind, msgspec.json.decode(payload))
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError,
                OverflowError):  # fmt: skip
            value = None
        self.items[key] = value
        return value


class BytesFile:
    """A black box that is already in memory (a member of an archive), with the calls that a file needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`."""
        return self._data[offset : offset + count]


class OpenFile:
    """A black box on disk; its rank may be writing to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`."""
        return os.pread(self._fd, min(count, max(0, self.size - offset)), offset)


def read_box(file: BytesFile | OpenFile, cache: HeapCache, max_bytes: int) -> Raw:
    """The content of a black box. Raises Unreadable when not even the header can be used."""
    head = _read_header(file)
    notes: list[str] = []
    capacity = _capacity(head, file.size, max_bytes, notes)
    rows, torn = _read_rings(file, head, capacity)
    # The heap is read after the ring, so that every id that a row mentions has been published.
    head = _read_header(file)
    heap = _read_heap(file, head, cache, notes)
    calls = _to_tables(rows, heap, notes)
    if int(head["heap_full"]):
        notes.append("the heap of the black box is full: some stacks and sizes are not recorded")
    if torn > 1:
        notes.append(f"{torn} records were being written")
    phase = cache.tables.names[heap.ids[Item.NAME].get(int(head["phase"]), 0)]
    raw = Raw(
        _trace_header(head, heap), calls, _groups(heap), f"black box {VERSION}", notes=tuple(notes), torn=torn
    )
    raw.progress = _progress(head, phase)
    raw.damaged = any(note.startswith("cut short") for note in notes)
    return raw


def _read_header(file: BytesFile | OpenFile) -> np.void:
    data = file.read(0, HEADER_BYTES)
    if len(data) < HEADER.itemsize or data[:8] != MAGIC:
        raise Unreadable("cut short inside its header", kind="black box")
    head: np.void = np.frombuffer(data, HEADER, 1)[0]
    if int(head["version"]) != VERSION:
        raise Unreadable(f"layout {int(head['version'])} is not known, only {VERSION}", kind="black box")
    if int(head["record_bytes"]) != CALL.itemsize:
        raise Unreadable(
            f"records of {int(head['record_bytes'])} bytes, not {CALL.itemsize}", kind="black box"
        )
    return head


def _capacity(head: np.void, size: int, max_bytes: int, notes: list[str]) -> int:
    """The slots that are really there."""
    capacity = int(head["capacity"])
    if capacity < 1:
        raise Unreadable("a ring of no records", kind="black box")
    there = max(0, size - HEADER_BYTES) // CALL.itemsize
    if capacity > there:
        notes.append(f"cut short: {there} of {capacity} slots are there")
    if min(capacity, there) * CALL.itemsize > max_bytes:
        raise Unreadable(
            f"a ring of {capacity} records is beyond the limit of {max_bytes} bytes", kind="black box"
        )
    return min(capacity, there)


def _read_rings(file: BytesFile | OpenFile, head: np.void, slots: int) -> tuple[np.ndarray, int]:
    """(whole rows in record order, torn rows). Only slots that were ever written are read.

    A reader that was put to sleep between its two looks finds many rows changed: it looks again.
    """
    # The header may lag behind the rows by one per recording thread; unwritten slots are zeros.
    used = min(slots, int(head["next_id"]) + LAG)
    live = not int(head["closed_ns"])
    rows, torn = _look(file, used, live)
    for _ in range(LOOKS - 1):
        if torn <= max(8, used // 20):
            break
        again, torn_again = _look(file, used, live)
        if torn_again < torn:
            rows, torn = again, torn_again
    return _in_order(rows), torn


def _look(file: BytesFile | OpenFile, used: int, live: bool) -> tuple[np.ndarray, int]:
    """(whole rows in slot order, torn rows) of one copy of the ring.

    Of a living file three copies are made: `end` is taken from the first, the rows from the second, `begin` from the
    third. Begin and end of one copy agree now and then in a row that was filled while the copy passed over it.
    """
    if not live:
        rows = _ring_copy(file, used)
        whole = whole_rows(rows, rows["begin"])
    else:
        copies = [_ring_copy(file, used) for _ in range(3)]
        count = min(len(copy) for copy in copies)
        before, rows, after = (copy[:count] for copy in copies)
        whole = whole_rows(rows, after["begin"], before["end"])
    torn = int(np.count_nonzero((rows["begin"] != 0) & ~whole))
    return rows if whole.all() else rows[whole], torn


def _ring_copy(file: BytesFile | OpenFile, used: int) -> np.ndarray:
    data = file.read(HEADER_BYTES, used * CALL.itemsize)
    return np.frombuffer(bytearray(data[: len(data) - len(data) % CALL.itemsize]), CALL)


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Rows by record id: a ring is turned; anything else is sorted, and a repeated id kept once."""
    ids = rows["begin"]
    wrap = int(np.argmin(ids)) if len(ids) else 0
    if wrap:
        words = rows.view(np.uint64).reshape(len(rows), -1)  # copied far faster than records
        rows = np.concatenate((words[wrap:], words[:wrap])).view(CALL)[:, 0]
    if len(rows) > 1 and (rows["begin"][1:] <= rows["begin"][:-1]).any():
        rows = rows[np.unique(rows["begin"], return_index=True)[1]]
    return rows


@dataclass
class _Heap:
    """One file's heap: per kind, the file's own id → what it stands for."""

    meta: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    ids: dict[int, dict[int, int]] = field(
        default_factory=lambda: {Item.NAME: {}, Item.SHAPES: {}, Item.STACK: {}}
    )


def _read_heap(file: BytesFile | OpenFile, head: np.void, cache: HeapCache, notes: list[str]) -> _Heap:
    heap = _Heap()
    used = min(int(head["heap_used"]), int(head["heap_bytes"]), MAX_HEAP_BYTES)
    data = file.read(int(head["heap_offset"]), used) if int(head["heap_offset"]) < 1 << 62 else b""
    if len(data) < used:
        notes.append(f"cut short: {len(data)} of {used} heap bytes are there")
    position, end, bad = 0, len(data), 0
    while position + ITEM_HEADER_BYTES <= end:
        length, kind, _, number = _item_header(data, position)
        start = position + ITEM_HEADER_BYTES
        if start + length > end:
            break
        bad += not _keep(heap, cache, kind, number, data[start : start + length])
        position = (start + length + 7) & ~7
    if bad:
        notes.append(f"{bad} heap items could not be read")
    return heap


def _keep(heap: _Heap, cache: HeapCache, kind: int, number: int, payload: bytes) -> bool:
    value = cache.find(kind, payload)
    if value is None:
        return kind > _LAST_KIND  # of a later version: not ours to judge
    if kind == Item.META:
        heap.meta.update(value)
    elif kind == Item.GROUP:
        heap.groups[number] = value
    elif kind in heap.ids:
        heap.ids[kind][number] = value
    return True


def _decode(tables: Tables, kind: int, value: Any) -> Any:
    """An item's JSON as an index into the shared tables (or a Group, or the meta dictionary)."""
    if kind == Item.NAME:
        return tables.name(value) if isinstance(value, str) else None
    if kind == Item.STACK:
        return tables.stack(tuple(tables.frame(str(n), str(f), int(line)) for n, f, line in value))
    if kind == Item.SHAPES:
        sizes, words = [_lists(part) for part in value[:2]], [tuple(map(str, part)) for part in value[2:4]]
        splits = [tuple(map(int, part or ())) for part in (*value[4:6], (), ())[:2]]
        return tables.shape(Shapes(sizes[0], sizes[1], words[0], words[1], splits[0], splits[1]))
    if kind == Item.GROUP:
        name, desc, ranks, backend = value
        members = tuple(int(rank) for rank in ranks[:MAX_MEMBERS])
        return tables.group(Group(str(name)[:MAX_TEXT], str(desc)[:MAX_TEXT], members, str(backend)[:64]))
    if kind == Item.META:
        return value if isinstance(value, dict) else None
    return None


def _lists(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(extent) for extent in size) for size in value)


def _to_tables(rows: np.ndarray, heap: _Heap, notes: list[str]) -> np.ndarray:
    """Replaces the file's own ids by indices into the shared tables. An id that is not in the heap becomes 0."""
    _map(rows, "op", heap.ids[Item.NAME])
    _map(rows, "label", heap.ids[Item.NAME])
    _map(rows, "shapes", heap.ids[Item.SHAPES])
    _map(rows, "stack", heap.ids[Item.STACK])
    order = {number: index for index, number in enumerate(sorted(heap.groups), start=1)}
    _map(rows, "group", order)
    if len(rows) and (rows["reduce_op"] >= len(REDUCE_OPS)).any():
        rows["reduce_op"][rows["reduce_op"] >= len(REDUCE_OPS)] = len(REDUCE_OPS) - 1
    if len(rows) and (rows["state"] > max(State)).any():
        notes.append("some records hold states that are not known")
        rows["state"][rows["state"] > max(State)] = State.SCHEDULED
    rows["flags"] &= _FLAG_MASK
    return rows


def _map(rows: np.ndarray, name: str, ids: dict[int, int]) -> None:
    top = max(ids, default=0)
    if top > 4 * len(ids) + 1024:  # hostile numbering: keep the lookup table small
        ids = {number: index for number, index in ids.items() if number <= 4 * len(ids) + 1024}
        top = max(ids, default=0)
    table = np.zeros(top + 2, np.uint32)
    if ids:
        table[np.fromiter(ids.keys(), np.int64, len(ids))] = np.fromiter(ids.values(), np.uint32, len(ids))
    table[top + 1] = 0
    rows[name] = table[np.minimum(rows[name], top + 1)]


def _groups(heap: _Heap) -> tuple[Group, ...]:
    return (Group(""), *(heap.groups[number] for number in sorted(heap.groups)))


def _trace_header(head: np.void, heap: _Heap) -> TraceHeader:
    meta = heap.meta
    versions = meta.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return TraceHeader(
        rank=int(head["rank"]) if int(head["rank"]) >= 0 else None,
        world_size=int(head["world_size"]) if int(head["world_size"]) > 0 else None,
        host=str(meta.get("host", ""))[:256],
        pid=int(head["pid"]),
        job=str(meta.get("job", ""))[:256],
        attempt=int(head["attempt"]),
        start_ns=int(head["start_ns"]),
        written_ns=max(int(head[name]) for name in ("start_ns", "step_ns", "last_call_ns", "closed_ns")),
        backend=str(meta.get("backend", ""))[:64],
        versions=tuple((str(name)[:64], str(text)[:64]) for name, text in versions.items()),
        dropped=max(0, int(head["next_id"]) - int(head["capacity"])),
    )


def _progress(head: np.void, phase: str) -> Progress:
    return Progress(
        step=int(head["step"]),
        step_ns=int(head["step_ns"]),
        calls_started=int(head["calls_started"]),
        calls_completed=int(head["calls_completed"]),
        phase=phase,
        expect_until_ns=int(head["expect_until_ns"]),
        closed=bytes(head["closed"]).split(b"\0")[0].decode("utf-8", "replace"),
    )
