"""The ring of a black box, copied once, in the order of its records, while its rank may be writing to it.

Only rows near the place where the rank writes can change under the reader; the header tells where that is. Those few
are read three times: `end` before the copy, the row with it, `begin` after it. A row is whole when all agree (see
blackbox/layout.py). Where the rank went on meanwhile, the rows that it may have written are read so once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from allranks.blackbox.header import HEADER_BYTES
from allranks.blackbox.layout import whole_rows
from allranks.model.trace import CALL

#: How far the header may lag behind the rows: one record per recording thread.
LAG = 64
#: How often a ring that changes too fast is copied at most.
LOOKS = 5
#: How much memory an Arena asks for at once.
PIECE_BYTES = 8 << 20
#: Fewer rows than this come from the ordinary heap.
FEW = 3 * LAG
ROW = CALL.itemsize


class Arena:
    """Memory for the rows of many files: taken from pieces so large that the kernel maps them in large pages, or from
    a buffer that is given. What has been taken lives as long as somebody holds it."""

    def __init__(self, buffer: np.ndarray | None = None) -> None:
        self._piece = np.zeros(0, CALL) if buffer is None else buffer
        self._given = buffer is not None

    def take(self, count: int) -> np.ndarray:
        """Room for so many rows, not cleared. Few rows are a second look mostly: not worth keeping a place for."""
        if count < FEW:
            return np.empty(count, CALL)
        if count > len(self._piece):
            if self._given or count * ROW > PIECE_BYTES // 8:
                return np.empty(count, CALL)
            self._piece = np.empty(PIECE_BYTES // ROW, CALL)
        rows, self._piece = self._piece[:count], self._piece[count:]
        return rows


class BytesFile:
    """A black box that is already in memory (a member of an archive), with the calls that a file needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`."""
        return self._data[offset : offset + count]

    def rows(self, first: int, count: int, turn: int = 0) -> np.ndarray:
        """The rows of slots first … first+count-1 that are there, beginning with slot first+turn."""
        data = self.read(HEADER_BYTES + first * ROW, count * ROW)
        words = np.frombuffer(data, np.uint64, len(data) // ROW * ROW // 8).reshape(-1, ROW // 8)
        return np.roll(words, -turn, axis=0).view(CALL)[:, 0] if turn else words.copy().view(CALL)[:, 0]


class OpenFile:
    """A black box on disk; its rank may be writing to it."""

    def __init__(self, fd: int, arena: Arena) -> None:
        self._fd = fd
        self._arena = arena
        self.size = os.fstat(fd).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`."""
        return os.pread(self._fd, min(count, max(0, self.size - offset)), offset)

    def rows(self, first: int, count: int, turn: int = 0) -> np.ndarray:
        """As BytesFile.rows; the kernel puts the two halves of the ring where they belong."""
        offset = HEADER_BYTES + first * ROW
        count = max(0, min(count, (self.size - offset) // ROW))
        rows = self._arena.take(count)
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
    near = _spans(max(0, next_id - LAG), 2 * LAG, capacity, used) if now is not None else []
    ends_before = [file.rows(first, count)["end"] for first, count in near]
    rows = file.rows(0, used, turn)
    begin = np.ascontiguousarray(rows["begin"])
    whole = (begin == rows["end"]) & (begin != 0)
    after = next_id if now is None else now()
    width = after - next_id + 2 * LAG
    if after < next_id or (after > next_id and width >= used):
        rows, whole = _three_looks(file, used)
    elif after > next_id:  # it is writing: what lies between is read again
        for first, count in _spans(max(0, next_id - LAG), width, capacity, used):
            again, fine = _look(file, first, count)
            at = (np.arange(first, first + len(again)) - turn) % max(1, len(rows))
            rows[at], whole[at] = again, fine
    else:
        for (first, count), ends in zip(near, ends_before, strict=True):
            begins = file.rows(first, count)["begin"]
            length = min(len(begins), len(ends))
            at = (np.arange(first, first + length) - turn) % max(1, len(rows))
            whole[at] &= (ends[:length] == begin[at]) & (begins[:length] == begin[at])
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
