"""Reads black boxes, also truncated ones and ones that a rank is writing to. No torch.

The ring is copied once, in record order. Only rows near the rank's write position, which is in the header, can change
meanwhile. Those are read again: their `end`, then the rows, then their `begin`. A row is whole if all agree (see
blackbox/layout.py); other rows are skipped and counted as torn. Then the heap is read (`tables.py`).
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import eq
from pathlib import Path

import numpy as np

from allranks.blackbox.header import HEADER_BYTES, STRUCT, Header, is_alive, parse_header
from allranks.blackbox.layout import Item, whole_rows
from allranks.blackbox.tables import Heap, Tables, read_heap
from allranks.errors import InputError
from allranks.model.trace import (
    CALL,
    REDUCE_OPS,
    Group,
    Progress,
    RankTrace,
    Rendezvous,
    Shapes,
    State,
    TraceHeader,
)

LAG = 64  # how far the header may lag behind the rows: one record per recording thread
ATTEMPTS = 5  # at copying a ring that changes too fast
ROW = CALL.itemsize


class BytesFile:
    """A black box in memory, such as a member of an archive."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, count: int) -> bytes:
        return self._data[offset : offset + count]

    def rows(self, first: int, count: int, turn: int = 0) -> np.ndarray:
        """The existing rows of slots first … first+count-1, rotated to begin with slot first+turn."""
        data = self.read(HEADER_BYTES + first * ROW, count * ROW)
        words = np.frombuffer(data, np.uint64, len(data) // ROW * ROW // 8).reshape(-1, ROW // 8)
        return np.roll(words, -turn, axis=0).view(CALL)[:, 0] if turn else words.copy().view(CALL)[:, 0]


class OpenFile:
    """A black box on disk; its rank may be writing to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, min(count, max(0, self.size - offset)), offset)

    def rows(self, first: int, count: int, turn: int = 0) -> np.ndarray:
        """As BytesFile.rows; one vectored read rotates the ring."""
        offset = HEADER_BYTES + first * ROW
        count = max(0, min(count, (self.size - offset) // ROW))
        rows = np.empty(count, CALL)
        turn = turn if turn < count else 0
        content = rows.view(np.uint8).data
        split = (count - turn) * ROW
        got = os.preadv(self._fd, [content[split:], content[:split]], offset) if count else 0
        if got < count * ROW:  # the file shrank: missing rows become empty slots
            rows = np.zeros(count, CALL)
            data = os.pread(self._fd, count * ROW, offset)
            rows.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return rows


File = BytesFile | OpenFile


def read_ring(
    file: File, capacity: int, slots: int, next_id: int, now: Callable[[], int] | None
) -> tuple[np.ndarray, int]:
    """(whole rows in record order, number of torn rows). `slots` are in the file. `now` reads next_id again; None if the
    writer has closed the file."""
    used = min(slots, next_id + LAG)
    turn = next_id % capacity if next_id > capacity == used else 0
    rows = file.rows(0, used, turn)
    begin = np.ascontiguousarray(rows["begin"])
    whole = (begin == rows["end"]) & (begin != 0)
    after = next_id if now is None else now()
    width = after - next_id + 2 * LAG
    if after < next_id or (after > next_id and width >= used):
        rows, whole = _read_changing(file, used)
    elif now is not None:  # reads rows again that may have been written meanwhile
        for first, count in _spans(max(0, next_id - LAG), width, capacity, used):
            again, fine = _read_checked(file, first, count)
            at = (np.arange(first, first + len(again)) - turn) % max(1, len(rows))
            rows[at], whole[at] = again, fine
    if bool(whole.all()):
        return _in_order(rows), 0
    torn = int(np.count_nonzero((rows["begin"] != 0) & ~whole))
    return _in_order(rows[whole]), torn


def read_newest(
    file: File, capacity: int, next_id: int, now: Callable[[], int] | None, newest: int
) -> np.ndarray | None:
    """The newest rows of a complete file, in record order. None if the caller must read all rows: there are few more, the
    rank is writing, or a row is torn."""
    if newest + LAG >= min(capacity, next_id):
        return None
    near = _spans(next_id - LAG, LAG, capacity, capacity) if now is not None else []
    ends_before = [file.rows(first, count)["end"] for first, count in near]
    spans = _spans(next_id - newest, newest + LAG, capacity, capacity)
    rows = _joined([file.rows(first, count) for first, count in spans])
    begins_after = [file.rows(first, count)["begin"] for first, count in near]
    begin = np.ascontiguousarray(rows["begin"])
    ids = np.arange(next_id - newest + 1, next_id + 1, dtype=np.uint64)
    if len(begin) != newest + LAG or (begin[newest:] > next_id).any() or (now and now() != next_id):
        return None
    if (begin[:newest] != ids).any() or (rows["end"][:newest] != ids).any():
        return None
    known = [np.concatenate(columns) for columns in (ends_before, begins_after) if columns]
    return rows[:newest] if all(np.array_equal(column, ids[-LAG:]) for column in known) else None


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenates rows as words, which numpy does much faster than with structured rows."""
    if len(pieces) == 1:
        return pieces[0]
    words = np.concatenate([rows.view(np.uint64).reshape(-1, ROW // 8) for rows in pieces])
    return words.view(CALL)[:, 0]


def _spans(first_id: int, width: int, capacity: int, used: int) -> list[tuple[int, int]]:
    """The slots of `width` records as (first, count); two spans if they wrap around the end of the ring."""
    first = first_id % capacity
    spans = [(first, min(first + width, used) - first)]
    if first + width > capacity:
        spans.append((0, min(first + width - capacity, used)))
    return [(start, count) for start, count in spans if count > 0]


def _read_changing(file: File, used: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads a ring in which any row may change: the best of a few attempts."""
    best = _read_checked(file, 0, used)
    for _ in range(ATTEMPTS - 1):
        if np.count_nonzero(~best[1]) <= max(8, used // 20):
            break
        again = _read_checked(file, 0, used)
        if np.count_nonzero(again[1]) > np.count_nonzero(best[1]):
            best = again
    return best


def _read_checked(file: File, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, which of them are whole), from three reads."""
    copies = [file.rows(first, count) for _ in range(3)]
    length = min(len(copy) for copy in copies)
    before, rows, after = (copy[:length] for copy in copies)
    return rows, whole_rows(rows, after["begin"], before["end"])


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Rows sorted by record id, without duplicates."""
    ids = np.ascontiguousarray(rows["begin"])
    if len(rows) > 1 and (ids[1:] <= ids[:-1]).any():
        rows = rows[np.unique(ids, return_index=True)[1]]
    return rows


MAX_BYTES = 1 << 30  # of a ring
MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
_HUGE = 1 << 62
#: The columns of ids, which are adjacent four-byte words.
_ID_COLUMNS = ("group", "op", "shapes", "stack", "label")
_FIRST_ID = int(CALL.fields["group"][1]) // 4  # type: ignore[index]


def read_trace(box: str | os.PathLike[str] | bytes, tables: Tables | None = None) -> RankTrace:
    """Reads one box from its path or its bytes. Boxes of one program share `tables`, which is faster."""
    tables = tables or Tables()
    if isinstance(box, bytes):
        trace, path = read_box(BytesFile(box), tables), ""
    else:
        with opened_box(box) as file:
            trace, path = read_box(file, tables), os.fspath(box)
    return trace.with_tables(*tables.freeze(), path)


def read_rows(path: str | os.PathLike[str], header: Header) -> np.ndarray:
    """The whole rows of a box in order, with the ids of the file."""
    with opened_box(path) as file:
        return _rows(file, header, MAX_BYTES, [])[0]


def copy_box(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a box as a new file, without torn rows, marked with the time if its process is running."""
    with opened_box(path) as box:
        header = parse_header(box.read(0, STRUCT.size))
        rows, _, slots = _rows(box, header, MAX_BYTES, [])
        ring = np.zeros(slots, CALL)
        ring[((rows["begin"] - 1) % np.uint64(header.capacity)).astype(np.int64)] = rows
        # header and heap are read last, so that they include every record and id in the rows
        head, runs = bytearray(box.read(0, HEADER_BYTES)), is_alive(header.pid, header.start_ticks)
        if runs and not header.closed_ns:
            struct.pack_into("<Q", head, STRUCT.size - 8, time.time_ns())
        return bytes(head) + ring.tobytes() + box.read(HEADER_BYTES + ring.nbytes, box.size)


@contextmanager
def opened_box(path: str | os.PathLike[str]) -> Iterator[OpenFile]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield OpenFile(file.fileno())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _rows(
    file: File, header: Header, max_bytes: int, notes: list[str], newest: int = 0
) -> tuple[np.ndarray, int, int]:
    """(whole rows in record order, torn rows, slots in the file); only the `newest` rows if that is not 0."""
    slots = _capacity(header, file.size, max_bytes, notes)

    def now() -> int:
        return min(parse_header(file.read(0, STRUCT.size)).next_id, _HUGE)

    next_id, again = min(header.next_id, _HUGE), now if header.closed_ns == 0 else None
    found = read_newest(file, slots, next_id, again, newest) if newest and slots == header.capacity else None
    if found is not None:
        return found, 0, slots
    rows, torn = read_ring(file, min(header.capacity, _HUGE), slots, next_id, again)
    return rows, torn, slots


def read_box(file: File, tables: Tables, max_bytes: int = MAX_BYTES, newest: int = 0) -> RankTrace:
    """Reads a black box, or only its `newest` calls, into a trace without tables. InputError if the header is unusable."""
    head = parse_header(file.read(0, STRUCT.size))
    notes: list[str] = []
    rows, torn, slots = _rows(file, head, max_bytes, notes, newest)
    older = max(0, min(slots, head.next_id) - len(rows) - torn) if len(rows) == newest else 0
    if not head.closed_ns:
        # read again after the rows, so that the heap includes every id in them
        head = parse_header(file.read(0, STRUCT.size))
    heap = _read_heap(file, head, tables, notes)
    order = {number: index for index, number in enumerate(sorted(heap.groups), start=1)}
    calls = _to_tables(rows, heap, order, notes)
    if head.heap_full:
        _add_sizes(calls, tables)
        notes.append("the heap of the black box is full: some stacks and sizes are not recorded")
    if torn > 1:
        notes.append(f"{torn} records were incomplete because the rank was writing them")
    phase, inside = (tables.names[heap.ids[Item.NAME].get(name, 0)] for name in (head.phase, head.inside))
    return RankTrace(
        _trace_header(head, heap),
        calls,
        (Group(""), *(heap.groups[number] for number in order)),
        progress=_progress(head, phase, inside, heap.meta.get("first_error")),
        kind=f"black box {head.version}",
        notes=tuple(notes),
        torn=torn,
        damaged=any(note.startswith("truncated") for note in notes),
        threads=heap.threads,
        destroyed={order[number]: when for number, when in heap.destroyed.items() if number in order},
        older=older,
    )


def _capacity(head: Header, size: int, max_bytes: int, notes: list[str]) -> int:
    """The number of slots in the file."""
    if head.record_bytes != CALL.itemsize:
        raise InputError(f"records have {head.record_bytes} bytes instead of {CALL.itemsize}")
    capacity: int = head.capacity
    if capacity < 1:
        raise InputError("the ring has no records")
    there = max(0, size - HEADER_BYTES) // CALL.itemsize
    if capacity > there:
        notes.append(f"truncated: only {there} of {capacity} slots")
    if min(capacity, there) * CALL.itemsize > max_bytes:
        raise InputError(f"a ring of {capacity} records exceeds the limit of {max_bytes} bytes")
    return min(capacity, there)


def _read_heap(file: File, head: Header, tables: Tables, notes: list[str]) -> Heap:
    used = min(head.heap_used, head.heap_bytes, MAX_HEAP_BYTES)
    data = file.read(head.heap_offset, used) if head.heap_offset < _HUGE else b""
    if len(data) < used:
        notes.append(f"truncated: only {len(data)} of {used} heap bytes")
    heap = read_heap(data, tables)
    if heap.bad:
        notes.append(f"{heap.bad} heap items could not be read")
    return heap


def _to_tables(rows: np.ndarray, heap: Heap, order: dict[int, int], notes: list[str]) -> np.ndarray:
    """Replaces the ids of the file by indices into the shared tables; an id that is not in the heap becomes 0."""
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
        notes.append("some records have unknown states")
        rows["state"][rows["state"] > max(State)] = State.SCHEDULED
    rows["flags"] &= _FLAG_MASK
    return rows


def _add_sizes(rows: np.ndarray, tables: Tables) -> None:
    """Sets the sizes of calls that did not fit into the heap, from the number of elements in their row."""
    lacking = np.flatnonzero((rows["shapes"] == 0) & ((rows["in_numel"] > 0) | (rows["out_numel"] > 0)))
    pairs = np.stack([rows[name][lacking] for name in ("in_numel", "out_numel")], axis=1)
    known, which = np.unique(pairs, axis=0, return_inverse=True)
    sizes = [[((count,),) if count >= 0 else () for count in pair] for pair in known.tolist()]
    numbers = [tables.shape(Shapes(inputs, outputs)) for inputs, outputs in sizes]
    rows["shapes"][lacking] = np.array(numbers, np.uint32)[which.reshape(-1)]


def _is_identity(ids: dict[int, int]) -> bool:
    """Whether ids map to themselves, as is usual for ranks of the same program."""
    return all(map(eq, ids, ids.values())) and next(iter(ids)) == 1 and next(reversed(ids)) == len(ids)


def _map(rows: np.ndarray, name: str, ids: dict[int, int]) -> None:
    """Replaces one column's ids."""
    highest = min(max(ids, default=0), 4 * len(ids) + 1024)  # limits the table for hostile ids
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
        start_ticks=head.start_ticks,
        job=str(meta.get("job", ""))[:256],
        attempt=head.attempt,
        start_ns=head.start_ns,
        written_ns=max(head.start_ns, head.step_ns, head.last_call_ns, head.closed_ns),
        taken_ns=head.taken_ns,
        backend=str(meta.get("backend", ""))[:64],
        versions=tuple((str(name)[:64], str(text)[:64]) for name, text in versions.items()),
        dropped=max(0, head.next_id - head.capacity),
        rendezvous=_rendezvous(meta.get("rendezvous")),
        launched=_rendezvous(meta.get("launched")),
        role=str(meta.get("role", ""))[:64],
    )


def _rendezvous(value: object) -> Rendezvous:
    """A Rendezvous from the heap; an empty one if it is invalid."""
    match value:
        case [str(address), int(size), str(line), *rest] if 0 <= size < 1 << 32:
            return Rendezvous(address[:256], size, line[:256], str(rest[0])[:256] if rest else "")
    return Rendezvous()


def _progress(head: Header, phase: str, inside: str, error: object) -> Progress:
    counts = (head.step, head.step_ns, head.calls_started, head.calls_completed)
    raised = (0, "")
    match error:
        case [int(number), str(text)] if 0 < number < 1 << 63:
            raised = (number, text[:512])
    inside, _, given = inside.partition(" ")
    members, _, how = given.partition(" ")
    listed = tuple(map(int, members.split(","))) if re.fullmatch(r"\d{1,9}(,\d{1,9})*", members) else ()
    times = (inside, head.inside_ns, head.setups)
    return Progress(*counts, phase, head.expect_until_ns, head.closed, *times, raised, listed, how == "local")


def find_boxes(folder: str | os.PathLike[str]) -> list[Path]:
    """The .box files below a folder, sorted by name."""
    return sorted(path for path in Path(folder).rglob("*.box") if path.is_file())


def boxes_of_process(pid: int) -> list[Path]:
    """The black boxes that a running process has mapped; [] without permission."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            names = {line.split(maxsplit=5)[5].strip() for line in maps if line.rstrip().endswith(".box")}
    except (OSError, IndexError):
        return []
    return sorted(path for name in names if (path := Path(name)).is_file())


def processes() -> list[int]:
    """The processes of this machine that we may inspect."""
    return sorted(
        int(path.name) for path in Path("/proc").glob("[0-9]*") if os.access(path / "maps", os.R_OK)
    )
