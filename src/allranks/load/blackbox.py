"""Black box files → Raw: one read of the ring, one of the used heap. Works on live, dead and cut files. A ring that is being written is copied, then its `begin` column is read again: rows that changed
meanwhile are skipped and counted as torn.
"""

from __future__ import annotations

import struct
from operator import eq
from typing import NamedTuple

import numpy as np

from allranks.blackbox.layout import HEADER, HEADER_BYTES, MAGIC, READABLE, Item, as_current
from allranks.blackbox.ring_copy import File, read_ring
from allranks.load.heap import Heap, HeapCache
from allranks.load.result import Raw, Unreadable
from allranks.load.tables import Tables
from allranks.model.trace import CALL, REDUCE_OPS, Group, Progress, Shapes, State, TraceHeader

MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
_HUGE = 1 << 62
#: The columns of ids stand side by side; as words of four bytes they are these.
_ID_COLUMNS = ("group", "op", "shapes", "stack", "label")
_FIRST_ID = int(CALL.fields["group"][1]) // 4  # type: ignore[index]


class Head(NamedTuple):
    """The header's fields, in the order of model.blackbox.HEADER."""

    magic: bytes
    version: int
    record_bytes: int
    capacity: int
    heap_offset: int
    heap_bytes: int
    heap_used: int
    heap_full: int
    next_id: int
    rank: int
    world_size: int
    local_rank: int
    attempt: int
    pid: int
    start_ns: int
    start_ticks: int
    step: int
    step_ns: int
    calls_started: int
    calls_completed: int
    last_call_ns: int
    expect_until_ns: int
    phase: int
    closed_ns: int
    closed: bytes
    inside: int
    inside_ns: int
    setups: int


_unpack_head = struct.Struct("<8sII6Q13qQq64sQqq").unpack_from


def read_box(file: File, cache: HeapCache, max_bytes: int) -> Raw:
    """The content of a black box. Raises Unreadable when not even the header can be used."""
    head = later = _read_header(file)
    notes: list[str] = []

    def now() -> int:
        nonlocal later
        later = _read_header(file)
        return min(later.next_id, _HUGE)

    capacity = _capacity(head, file.size, max_bytes, notes)
    closed = head.closed_ns != 0
    next_id = min(head.next_id, _HUGE)
    rows, torn = read_ring(file, min(head.capacity, _HUGE), capacity, next_id, None if closed else now)
    # The heap is read after the rows, so that every id that they mention has been published.
    head = later if later.next_id == head.next_id else _read_header(file)
    heap = _read_heap(file, head, cache, notes)
    as_current(rows, head.version)
    order = {number: index for index, number in enumerate(sorted(heap.groups), start=1)}
    calls = _to_tables(rows, heap, order, notes)
    if head.heap_full:
        _add_sizes(calls, cache.tables)
        notes.append("the heap of the black box is full: some stacks and sizes are not recorded")
    if torn > 1:
        notes.append(f"{torn} records were being written")
    phase, inside = (
        cache.tables.names[heap.ids[Item.NAME].get(name, 0)] for name in (head.phase, head.inside)
    )
    raw = Raw(
        _trace_header(head, heap),
        calls,
        _groups(heap),
        f"black box {head.version}",
        notes=tuple(notes),
        torn=torn,
    )
    raw.progress = _progress(head, phase, inside)
    raw.threads = heap.threads
    raw.destroyed = {order[number]: when for number, when in heap.destroyed.items() if number in order}
    raw.damaged = any(note.startswith("cut short") for note in notes)
    return raw


def _read_header(file: File) -> Head:
    data = file.read(0, HEADER.itemsize)
    if len(data) < HEADER.itemsize or data[:8] != MAGIC:
        raise Unreadable("cut short inside its header", kind="black box")
    head = Head._make(_unpack_head(data))
    if head.version not in READABLE:
        raise Unreadable(f"layout {head.version} is not known, only up to {READABLE[-1]}", kind="black box")
    if head.record_bytes != CALL.itemsize:
        raise Unreadable(f"records of {head.record_bytes} bytes, not {CALL.itemsize}", kind="black box")
    return head


def _capacity(head: Head, size: int, max_bytes: int, notes: list[str]) -> int:
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


def _read_heap(file: File, head: Head, cache: HeapCache, notes: list[str]) -> Heap:
    used = min(head.heap_used, head.heap_bytes, MAX_HEAP_BYTES)
    data = file.read(head.heap_offset, used) if head.heap_offset < _HUGE else b""
    if len(data) < used:
        notes.append(f"cut short: {len(data)} of {used} heap bytes are there")
    heap = cache.read(data)
    if heap.bad:
        notes.append(f"{heap.bad} heap items could not be read")
    return heap


def _to_tables(rows: np.ndarray, heap: Heap, order: dict[int, int], notes: list[str]) -> np.ndarray:
    """Replaces the file's own ids by indices into the shared tables. An id that is not in the heap becomes 0."""
    if len(rows):
        names = heap.ids[Item.NAME]
        maps = (order, names, heap.ids[Item.SHAPES], heap.ids[Item.STACK], names)
        words = rows.view(np.uint32).reshape(len(rows), -1)
        columns = np.ascontiguousarray(words[:, _FIRST_ID : _FIRST_ID + len(maps)].T)
        highest = columns.max(axis=1).tolist()
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


def _add_sizes(rows: np.ndarray, tables: Tables) -> None:
    """Gives calls whose sizes found no room in the heap the number of elements that stands in their row."""
    lacking = np.flatnonzero((rows["shapes"] == 0) & ((rows["in_numel"] > 0) | (rows["out_numel"] > 0)))
    pairs = np.stack([rows[name][lacking] for name in ("in_numel", "out_numel")], axis=1)
    known, which = np.unique(pairs, axis=0, return_inverse=True)
    sizes = [[((count,),) if count >= 0 else () for count in pair] for pair in known.tolist()]
    numbers = [tables.shape(Shapes(inputs, outputs)) for inputs, outputs in sizes]
    rows["shapes"][lacking] = np.array(numbers, np.uint32)[which.reshape(-1)]


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


def _groups(heap: Heap) -> tuple[Group, ...]:
    return (Group(""), *(heap.groups[number] for number in sorted(heap.groups)))


def _trace_header(head: Head, heap: Heap) -> TraceHeader:
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


def _progress(head: Head, phase: str, inside: str) -> Progress:
    return Progress(
        step=head.step,
        step_ns=head.step_ns,
        calls_started=head.calls_started,
        calls_completed=head.calls_completed,
        phase=phase,
        expect_until_ns=head.expect_until_ns,
        closed=head.closed.split(b"\0")[0].decode("utf-8", "replace"),
        inside=inside,
        inside_ns=head.inside_ns,
        setups=head.setups if head.version > 1 else -1,
    )
