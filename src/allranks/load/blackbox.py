"""Black box files → Raw: one read of the ring, one of the used heap. Works on live, dead and cut files.

The heap of every rank of a job holds nearly the same items, so items are decoded once per load and found again
by their bytes. A ring that is being written is copied, then its `begin` column is read again: rows that changed
meanwhile are skipped and counted as torn.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from operator import eq
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from allranks.load.groups import MAX_MEMBERS
from allranks.load.result import Raw, Unreadable
from allranks.load.ring import File, read_ring
from allranks.load.tables import MAX_TEXT, Tables
from allranks.model.blackbox import HEADER, HEADER_BYTES, ITEM_HEADER_BYTES, MAGIC, VERSION, Item
from allranks.model.trace import CALL, REDUCE_OPS, Group, Progress, Shapes, State, TraceHeader

_item_header = struct.Struct("<IHHI").unpack_from
MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
_LAST_KIND = int(max(Item))
_HUGE = 1 << 62
_NEXT_ID = int(HEADER.fields["next_id"][1])  # type: ignore[index]
#: The columns of ids stand side by side; as words of four bytes they are these.
_ID_COLUMNS = ("group", "op", "shapes", "stack", "label")
_FIRST_ID = int(CALL.fields["group"][1]) // 4  # type: ignore[index]
#: Items longer than this are compared, not hashed: a member list of 16,384 ranks is in every file.
LONG_ITEM = 2048


@dataclass
class HeapCache:
    """Heap items by their bytes, over all files of one load."""

    tables: Tables
    items: dict[bytes, Any] = field(default_factory=dict)
    long_items: dict[tuple[int, bytes], list[bytes]] = field(default_factory=dict)

    def known(self, data: bytes, position: int, behind: int) -> bytes:
        """The item at a place of a heap; a long one that was seen before is not copied."""
        if behind - position <= LONG_ITEM:
            return data[position:behind]
        key = (behind - position, data[behind - 64 : behind])
        candidates = self.long_items.setdefault(key, [])
        for candidate in candidates:
            if data.startswith(candidate, position):
                return candidate  # its hash is known already
        candidates.append(data[position:behind])
        return candidates[-1]

    def add(self, item: bytes, kind: int) -> Any:
        """Decodes an item: an index into the tables, a Group, or the meta dictionary; None when unreadable."""
        try:
            value = _decode(self.tables, kind, msgspec.json.decode(item[ITEM_HEADER_BYTES:]))
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError,
                OverflowError):  # fmt: skip
            value = None
        self.items[item] = value
        return value


def read_box(file: File, cache: HeapCache, max_bytes: int) -> Raw:
    """The content of a black box. Raises Unreadable when not even the header can be used."""
    head = _read_header(file)
    notes: list[str] = []
    capacity = _capacity(head, file.size, max_bytes, notes)
    closed = head.closed_ns != 0
    now = None if closed else lambda: _read_next_id(file)
    rows, torn = read_ring(file, min(head.capacity, _HUGE), capacity, min(head.next_id, _HUGE), now)
    # The heap is read after the ring, so that every id that a row mentions has been published.
    head = head if closed else _read_header(file)
    heap = _read_heap(file, head, cache, notes)
    calls = _to_tables(rows, heap, notes)
    if head.heap_full:
        notes.append("the heap of the black box is full: some stacks and sizes are not recorded")
    if torn > 1:
        notes.append(f"{torn} records were being written")
    phase = cache.tables.names[heap.ids[Item.NAME].get(head.phase, 0)]
    raw = Raw(
        _trace_header(head, heap), calls, _groups(heap), f"black box {VERSION}", notes=tuple(notes), torn=torn
    )
    raw.progress = _progress(head, phase)
    raw.damaged = any(note.startswith("cut short") for note in notes)
    return raw


def _read_header(file: File) -> SimpleNamespace:
    data = file.read(0, HEADER.itemsize)
    if len(data) < HEADER.itemsize or data[:8] != MAGIC:
        raise Unreadable("cut short inside its header", kind="black box")
    head = SimpleNamespace(
        **dict(zip(HEADER.names or (), np.frombuffer(data, HEADER, 1)[0].item(), strict=True))
    )
    if head.version != VERSION:
        raise Unreadable(f"layout {head.version} is not known, only {VERSION}", kind="black box")
    if head.record_bytes != CALL.itemsize:
        raise Unreadable(f"records of {head.record_bytes} bytes, not {CALL.itemsize}", kind="black box")
    return head


def _read_next_id(file: File) -> int:
    """How many records were begun by now."""
    return min(int.from_bytes(file.read(_NEXT_ID, 8), "little"), _HUGE)


def _capacity(head: SimpleNamespace, size: int, max_bytes: int, notes: list[str]) -> int:
    """The slots that are really there."""
    capacity: int = head.capacity
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


@dataclass
class _Heap:
    """One file's heap: per kind, the file's own id → what it stands for."""

    meta: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    ids: dict[int, dict[int, int]] = field(
        default_factory=lambda: {Item.NAME: {}, Item.SHAPES: {}, Item.STACK: {}}
    )


def _read_heap(file: File, head: SimpleNamespace, cache: HeapCache, notes: list[str]) -> _Heap:
    heap = _Heap()
    used = min(head.heap_used, head.heap_bytes, MAX_HEAP_BYTES)
    data = file.read(head.heap_offset, used) if head.heap_offset < 1 << 62 else b""
    if len(data) < used:
        notes.append(f"cut short: {len(data)} of {used} heap bytes are there")
    position, end, bad, known = 0, len(data), 0, cache.items
    while position + ITEM_HEADER_BYTES <= end:
        length, kind, _, number = _item_header(data, position)
        behind = position + ITEM_HEADER_BYTES + length
        if behind > end:
            break
        item = cache.known(data, position, behind)
        value = known.get(item)
        if value is None:
            value = cache.add(item, kind)
        position = (behind + 7) & ~7
        if value is None:
            bad += kind <= _LAST_KIND  # a kind of a later version is not ours to judge
        elif kind in heap.ids:
            heap.ids[kind][number] = value
        elif kind == Item.GROUP:
            heap.groups[number] = value
        else:
            heap.meta.update(value)
    if bad:
        notes.append(f"{bad} heap items could not be read")
    return heap


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
    if len(rows):
        names = heap.ids[Item.NAME]
        order = {number: index for index, number in enumerate(sorted(heap.groups), start=1)}
        maps = (order, names, heap.ids[Item.SHAPES], heap.ids[Item.STACK], names)
        words = rows.view(np.uint32).reshape(len(rows), -1)
        highest = words[:, _FIRST_ID : _FIRST_ID + len(maps)].max(axis=0).tolist()
        for column, ids, top in zip(_ID_COLUMNS, maps, highest, strict=True):
            if top and not (top <= len(ids) and _is_identity(ids)):
                _map(rows, column, ids)
    if len(rows) and (rows["reduce_op"] >= len(REDUCE_OPS)).any():
        rows["reduce_op"][rows["reduce_op"] >= len(REDUCE_OPS)] = len(REDUCE_OPS) - 1
    if len(rows) and (rows["state"] > max(State)).any():
        notes.append("some records hold states that are not known")
        rows["state"][rows["state"] > max(State)] = State.SCHEDULED
    rows["flags"] &= _FLAG_MASK
    return rows


def _is_identity(ids: dict[int, int]) -> bool:
    """Whether 1 → 1, 2 → 2, …: ranks that write alike number alike, so that mostly nothing must be changed."""
    return all(map(eq, ids, ids.values())) and next(iter(ids)) == 1 and next(reversed(ids)) == len(ids)


def _map(rows: np.ndarray, name: str, ids: dict[int, int]) -> None:
    """Replaces one column's ids."""
    highest = min(max(ids, default=0), 4 * len(ids) + 1024)  # hostile numbering must not make a large table
    table = np.zeros(highest + 2, np.uint32)
    for number, index in ids.items():
        if number <= highest:
            table[number] = index
    rows[name] = table[np.minimum(rows[name], highest + 1)]


def _groups(heap: _Heap) -> tuple[Group, ...]:
    return (Group(""), *(heap.groups[number] for number in sorted(heap.groups)))


def _trace_header(head: SimpleNamespace, heap: _Heap) -> TraceHeader:
    meta = heap.meta
    versions = meta.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return TraceHeader(
        rank=head.rank if head.rank >= 0 else None,
        world_size=head.world_size if head.world_size > 0 else None,
        host=str(meta.get("host", ""))[:256],
        pid=head.pid,
        job=str(meta.get("job", ""))[:256],
        attempt=head.attempt,
        start_ns=head.start_ns,
        written_ns=max(head.start_ns, head.step_ns, head.last_call_ns, head.closed_ns),
        backend=str(meta.get("backend", ""))[:64],
        versions=tuple((str(name)[:64], str(text)[:64]) for name, text in versions.items()),
        dropped=max(0, head.next_id - head.capacity),
    )


def _progress(head: SimpleNamespace, phase: str) -> Progress:
    return Progress(
        step=head.step,
        step_ns=head.step_ns,
        calls_started=head.calls_started,
        calls_completed=head.calls_completed,
        phase=phase,
        expect_until_ns=head.expect_until_ns,
        closed=bytes(head.closed).split(b"\0")[0].decode("utf-8", "replace"),
    )
