"""Reads black boxes, also while their rank writes to them and also cut short. No torch, no help from the rank.

One read of the ring (`ring_copy.py`: rows that changed meanwhile are left out and counted as torn), one of the used heap
(`tables.py`). Nothing in the bytes is ever executed. `header.py` reads the header alone, several times a second if need be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import eq
from pathlib import Path
from typing import BinaryIO

import numpy as np

from allranks.blackbox.header import HEADER_BYTES, STRUCT, Header, parse_header
from allranks.blackbox.layout import Item, as_current
from allranks.blackbox.ring_copy import Arena, BytesFile, File, OpenFile, read_newest, read_ring
from allranks.blackbox.tables import Heap, HeapCache, Tables
from allranks.errors import InputError
from allranks.model.trace import CALL, REDUCE_OPS, Group, Progress, RankTrace, Raw, Shapes, State, TraceHeader

MAX_BYTES = 1 << 30  # of a ring
MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
_HUGE = 1 << 62
#: The columns of ids stand side by side; as words of four bytes they are these.
_ID_COLUMNS = ("group", "op", "shapes", "stack", "label")
_FIRST_ID = int(CALL.fields["group"][1]) // 4  # type: ignore[index]


def read_trace(box: str | os.PathLike[str] | bytes) -> RankTrace:
    """Everything in one box, given by its path or its bytes. InputError when it is none."""
    cache = HeapCache(Tables())
    if isinstance(box, bytes):
        raw, path = read_box(BytesFile(box), cache), ""
    else:
        with _opened(box) as file:
            raw, path = read_box(OpenFile(file.fileno(), Arena()), cache), os.fspath(box)
    return raw.as_trace(*cache.tables.freeze(), path)


def read_rows(path: str | os.PathLike[str], header: Header) -> np.ndarray:
    """The whole rows of a box in order, their ids those of the file; InputError when it cannot be read."""
    with _opened(path) as file:
        return _rows(OpenFile(file.fileno(), Arena()), header, MAX_BYTES, [])[0]


def copy_box(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a box as a file of its own: rows that were being written are left out."""
    with _opened(path) as file:
        box = OpenFile(file.fileno(), Arena())
        header = parse_header(box.read(0, STRUCT.size))
        rows, _, slots = _rows(box, header, MAX_BYTES, [])
        ring = np.zeros(slots, CALL)
        ring[((rows["begin"] - 1) % np.uint64(header.capacity)).astype(np.int64)] = rows
        # The header and the heap come last: they know every record and id that the rows mention.
        return box.read(0, HEADER_BYTES) + ring.tobytes() + box.read(HEADER_BYTES + ring.nbytes, box.size)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _rows(
    file: File, header: Header, max_bytes: int, notes: list[str], newest: int = 0
) -> tuple[np.ndarray, int, int]:
    """(whole rows in record order, torn rows, slots that are there); only so many of the newest rows, if that is given."""
    slots = _capacity(header, file.size, max_bytes, notes)

    def now() -> int:
        return min(parse_header(file.read(0, STRUCT.size)).next_id, _HUGE)

    next_id, again = min(header.next_id, _HUGE), now if header.closed_ns == 0 else None
    if newest and slots == header.capacity:
        found = read_newest(file, slots, next_id, again, newest)
        if found is not None:
            return found, 0, slots
    rows, torn = read_ring(file, min(header.capacity, _HUGE), slots, next_id, again)
    return rows, torn, slots


def read_box(file: File, cache: HeapCache, max_bytes: int = MAX_BYTES, newest: int = 0) -> Raw:
    """The content of a black box, or only so many of its newest calls. Raises InputError when not even the header can
    be used."""
    head = parse_header(file.read(0, STRUCT.size))
    notes: list[str] = []
    rows, torn, slots = _rows(file, head, max_bytes, notes, newest)
    older = max(0, min(slots, head.next_id) - len(rows) - torn) if len(rows) == newest else 0
    if not head.closed_ns:
        # The heap is read behind the rows, so that every id that they mention has been published.
        head = parse_header(file.read(0, STRUCT.size))
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
    return Raw(
        _trace_header(head, heap),
        calls,
        (Group(""), *(heap.groups[number] for number in order)),
        f"black box {head.version}",
        _progress(head, phase, inside),
        tuple(notes),
        torn,
        damaged=any(note.startswith("cut short") for note in notes),
        threads=heap.threads,
        destroyed={order[number]: when for number, when in heap.destroyed.items() if number in order},
        older=older,
    )


def _capacity(head: Header, size: int, max_bytes: int, notes: list[str]) -> int:
    """The slots that are really there."""
    if head.record_bytes != CALL.itemsize:
        raise InputError(f"records of {head.record_bytes} bytes, not {CALL.itemsize}")
    capacity: int = head.capacity
    if capacity < 1:
        raise InputError("a ring of no records")
    there = max(0, size - HEADER_BYTES) // CALL.itemsize
    if capacity > there:
        notes.append(f"cut short: {there} of {capacity} slots are there")
    if min(capacity, there) * CALL.itemsize > max_bytes:
        raise InputError(f"a ring of {capacity} records is beyond the limit of {max_bytes} bytes")
    return min(capacity, there)


def _read_heap(file: File, head: Header, cache: HeapCache, notes: list[str]) -> Heap:
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


def _trace_header(head: Header, heap: Heap) -> TraceHeader:
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


def _progress(head: Header, phase: str, inside: str) -> Progress:
    counts = (head.step, head.step_ns, head.calls_started, head.calls_completed)
    setups = head.setups if head.version > 1 else -1
    return Progress(
        *counts, phase, head.expect_until_ns, head.closed, inside, inside_ns=head.inside_ns, setups=setups
    )


def find_boxes(folder: str | os.PathLike[str]) -> list[Path]:
    """The black boxes under a folder, oldest name first; files that are none are passed over."""
    return sorted(path for path in Path(folder).rglob("*.box") if path.is_file())


def boxes_of_process(pid: int) -> list[Path]:
    """The black boxes that a living process writes to, wherever they are; empty when we may not look."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            names = {line.split(maxsplit=5)[5].strip() for line in maps if line.rstrip().endswith(".box")}
    except (OSError, IndexError):
        return []
    return sorted(path for name in names if (path := Path(name)).is_file())


def processes() -> list[int]:
    """Processes of this machine that we may look into."""
    return sorted(
        int(path.name) for path in Path("/proc").glob("[0-9]*") if os.access(path / "maps", os.R_OK)
    )
