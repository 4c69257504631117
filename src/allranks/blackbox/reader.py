"""Reads black boxes, also while their rank writes to them and also cut short. No torch, no help from the rank.

The ring is copied once, in the order of its records. Only rows near the place where the rank writes can change under the
reader; the header tells where that is. Those few are read three times more: their `end`, then the rows, then their `begin`. A
row is whole when all agree (see blackbox/layout.py); rows that are not are left out and counted as torn.

Then the used heap is read (`tables.py`). Nothing in the bytes is ever executed. `header.py` reads the header alone, several
times a second if need be.
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
    Raw,
    Rendezvous,
    Shapes,
    State,
    TraceHeader,
)

#: How far the header may lag behind the rows: one record per recording thread.
LAG = 64
#: How often a ring that changes too fast is copied at most.
LOOKS = 5
ROW = CALL.itemsize


class BytesFile:
    """A black box that is already in memory (a member of an archive), with the calls that a file needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, count: int) -> bytes:
        return self._data[offset : offset + count]

    def rows(self, first: int, count: int, turn: int = 0) -> np.ndarray:
        """The rows of slots first … first+count-1 that are there, beginning with slot first+turn."""
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
        """As BytesFile.rows; the kernel puts the two halves of the ring where they belong."""
        offset = HEADER_BYTES + first * ROW
        count = max(0, min(count, (self.size - offset) // ROW))
        rows = np.empty(count, CALL)
        turn = turn if turn < count else 0
        content = rows.view(np.uint8).data
        split = (count - turn) * ROW
        got = os.preadv(self._fd, [content[split:], content[:split]], offset) if count else 0
        if got < count * ROW:  # the file shrank: what is missing reads as empty slots
            rows = np.zeros(count, CALL)
            data = os.pread(self._fd, count * ROW, offset)
            rows.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return rows


File = BytesFile | OpenFile


def read_ring(
    file: File, capacity: int, slots: int, next_id: int, now: Callable[[], int] | None
) -> tuple[np.ndarray, int]:
    """(whole rows in record order, torn rows). `slots` of the ring are in the file. `now` reads the header's next_id
    again; None for a file that nobody writes to."""
    used = min(slots, next_id + LAG)
    turn = next_id % capacity if next_id > capacity == used else 0
    rows = file.rows(0, used, turn)
    begin = np.ascontiguousarray(rows["begin"])
    whole = (begin == rows["end"]) & (begin != 0)
    after = next_id if now is None else now()
    width = after - next_id + 2 * LAG
    if after < next_id or (after > next_id and width >= used):
        rows, whole = _three_looks(file, used)
    elif now is not None:  # what it may have written meanwhile, or is writing now, is read again
        for first, count in _spans(max(0, next_id - LAG), width, capacity, used):
            again, fine = _look(file, first, count)
            at = (np.arange(first, first + len(again)) - turn) % max(1, len(rows))
            rows[at], whole[at] = again, fine
    if bool(whole.all()):
        return _in_order(rows), 0
    torn = int(np.count_nonzero((rows["begin"] != 0) & ~whole))
    return _in_order(rows[whole]), torn


def read_newest(
    file: File, capacity: int, next_id: int, now: Callable[[], int] | None, newest: int
) -> np.ndarray | None:
    """The newest rows of a file that has all its slots, in record order. None when all must be read: there are hardly
    more, the rank is writing, or a row is torn."""
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
    """Rows behind each other. Numpy joins words much faster than rows of many columns."""
    if len(pieces) == 1:
        return pieces[0]
    words = np.concatenate([rows.view(np.uint64).reshape(-1, ROW // 8) for rows in pieces])
    return words.view(CALL)[:, 0]


def _spans(first_id: int, width: int, capacity: int, used: int) -> list[tuple[int, int]]:
    """The slots of `width` records, as (first, count); two when they go round the end of the ring."""
    first = first_id % capacity
    spans = [(first, min(first + width, used) - first)]
    if first + width > capacity:
        spans.append((0, min(first + width - capacity, used)))
    return [(start, count) for start, count in spans if count > 0]


def _three_looks(file: File, used: int) -> tuple[np.ndarray, np.ndarray]:
    """A ring of which any row may be changing: the best of a few attempts."""
    best = _look(file, 0, used)
    for _ in range(LOOKS - 1):
        if np.count_nonzero(~best[1]) <= max(8, used // 20):
            break
        again = _look(file, 0, used)
        if np.count_nonzero(again[1]) > np.count_nonzero(best[1]):
            best = again
    return best


def _look(file: File, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, which of them are whole) of some slots, by three readings."""
    copies = [file.rows(first, count) for _ in range(3)]
    length = min(len(copy) for copy in copies)
    before, rows, after = (copy[:length] for copy in copies)
    return rows, whole_rows(rows, after["begin"], before["end"])


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Rows by record id, a repeated id kept once."""
    ids = np.ascontiguousarray(rows["begin"])
    if len(rows) > 1 and (ids[1:] <= ids[:-1]).any():
        rows = rows[np.unique(ids, return_index=True)[1]]
    return rows


MAX_BYTES = 1 << 30  # of a ring
MAX_HEAP_BYTES = 256 << 20
_FLAG_MASK = 0x7F
_HUGE = 1 << 62
#: The columns of ids stand side by side; as words of four bytes they are these.
_ID_COLUMNS = ("group", "op", "shapes", "stack", "label")
_FIRST_ID = int(CALL.fields["group"][1]) // 4  # type: ignore[index]


def read_trace(box: str | os.PathLike[str] | bytes, tables: Tables | None = None) -> RankTrace:
    """Everything in one box, given by its path or its bytes. InputError when it is none. Boxes of one program with the same `tables`
    are read faster."""
    tables = tables or Tables()
    if isinstance(box, bytes):
        raw, path = read_box(BytesFile(box), tables), ""
    else:
        with opened_box(box) as file:
            raw, path = read_box(file, tables), os.fspath(box)
    return raw.as_trace(*tables.freeze(), path)


def read_rows(path: str | os.PathLike[str], header: Header) -> np.ndarray:
    """The whole rows of a box in order, their ids those of the file; InputError when it cannot be read."""
    with opened_box(path) as file:
        return _rows(file, header, MAX_BYTES, [])[0]


def copy_box(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a box as a file of its own: rows that were being written are left out. It says that its process ran."""
    with opened_box(path) as box:
        header = parse_header(box.read(0, STRUCT.size))
        rows, _, slots = _rows(box, header, MAX_BYTES, [])
        ring = np.zeros(slots, CALL)
        ring[((rows["begin"] - 1) % np.uint64(header.capacity)).astype(np.int64)] = rows
        # The header and the heap come last: they know every record and id that the rows mention.
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
    """(whole rows in record order, torn rows, slots that are there); only so many of the newest rows, if that is given."""
    slots = _capacity(header, file.size, max_bytes, notes)

    def now() -> int:
        return min(parse_header(file.read(0, STRUCT.size)).next_id, _HUGE)

    next_id, again = min(header.next_id, _HUGE), now if header.closed_ns == 0 else None
    found = read_newest(file, slots, next_id, again, newest) if newest and slots == header.capacity else None
    if found is not None:
        return found, 0, slots
    rows, torn = read_ring(file, min(header.capacity, _HUGE), slots, next_id, again)
    return rows, torn, slots


def read_box(file: File, tables: Tables, max_bytes: int = MAX_BYTES, newest: int = 0) -> Raw:
    """The content of a black box, or only so many of its newest calls. Raises InputError when not even the header can
    be used."""
    head = parse_header(file.read(0, STRUCT.size))
    notes: list[str] = []
    rows, torn, slots = _rows(file, head, max_bytes, notes, newest)
    older = max(0, min(slots, head.next_id) - len(rows) - torn) if len(rows) == newest else 0
    if not head.closed_ns:
        # The heap is read behind the rows, so that every id that they mention has been published.
        head = parse_header(file.read(0, STRUCT.size))
    heap = _read_heap(file, head, tables, notes)
    order = {number: index for index, number in enumerate(sorted(heap.groups), start=1)}
    calls = _to_tables(rows, heap, order, notes)
    if head.heap_full:
        _add_sizes(calls, tables)
        notes.append("the heap of the black box is full: some stacks and sizes are not recorded")
    if torn > 1:
        notes.append(f"{torn} records were being written")
    phase, inside = (tables.names[heap.ids[Item.NAME].get(name, 0)] for name in (head.phase, head.inside))
    return Raw(
        _trace_header(head, heap),
        calls,
        (Group(""), *(heap.groups[number] for number in order)),
        f"black box {head.version}",
        _progress(head, phase, inside, heap.meta.get("first_error")),
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


def _read_heap(file: File, head: Header, tables: Tables, notes: list[str]) -> Heap:
    used = min(head.heap_used, head.heap_bytes, MAX_HEAP_BYTES)
    data = file.read(head.heap_offset, used) if head.heap_offset < _HUGE else b""
    if len(data) < used:
        notes.append(f"cut short: {len(data)} of {used} heap bytes are there")
    heap = read_heap(data, tables)
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
    """As it stands in the heap; unknown when that is none."""
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
