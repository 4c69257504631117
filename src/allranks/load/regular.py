"""Reads large pickles of torch by their repeated byte patterns, which is faster than unpickling.

Entries of a dump repeat a few byte patterns and differ only in some numbers. One entry of each pattern, and all entries that
define memo numbers, form a small pickle, which is unpickled. The numbers of the other entries are read from the bytes, by
column. Anything unexpected raises Irregular; then the whole file is unpickled, with the same result.

Every entry after the first begins with a dictionary, a mark and the first key from the memo. Text and frames get a memo number
at their first occurrence. Only the opcodes of torch's pickler are supported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from allranks.load.calls import NUMBERS
from allranks.model.trace import CALL

#: opcode → operand bytes, without text and long numbers
_OPERANDS = {
    # containers, tuples, True, False, None
    **dict.fromkeys(b"}]()ueast\x85\x86\x87\x88\x89N", 0),
    **dict.fromkeys(b"Khq", 1),  # BININT1, BINGET, BINPUT
    ord("M"): 2,
    ord("G"): 8,  # BININT2, BINFLOAT
    **dict.fromkeys(b"Jjr", 4),  # BININT, LONG_BINGET, LONG_BINPUT
}
PUTS, GETS = (0x71, 0x72), (0x68, 0x6A)
TEXT, LONG1, MARK, SET_ITEMS = 0x58, 0x8A, 0x28, 0x75
_CLOSING = (0x75, 0x65, 0x74)
_FORMATS = {0x4B: "u1", 0x4D: "<u2", 0x4A: "<i4", 0x8A: "<i8", 0x47: ">f8"}

#: keys of numbers that differ between entries
VARYING = (
    *("record_id", "collective_seq_id", "p2p_seq_id", "op_id", "duration_ms"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
)

MIN_BYTES = 16384  # smaller files are unpickled
MAX_PATTERN_SHARE = 0.5  # of the entries; with more patterns unpickling is as fast
MAX_LAYOUTS = 256
FEW = 6  # so few entries of one length do not get a layout
#: (column of CALL, key of VARYING)
COLUMNS = tuple((column, key) for column, key in NUMBERS if key in VARYING)
MAX_ENTRY_BYTES = 4096
#: The first entry, after the key "entries", an empty list and a mark.
_OPENING = re.compile(rb"X\x07\x00\x00\x00entries(?:q.|r....)\]\(\}", re.DOTALL)
Token = tuple[int, int, int]  # opcode, operand offset, operand bytes


class Irregular(Exception):
    """The bytes are not laid out as expected: the file must be unpickled."""


@dataclass(frozen=True)
class Layout:
    """The layout of all entries that equal `template` in the bytes of `fixed`. Words have 8 bytes, the last is padded."""

    template: np.ndarray  # the words of one such entry
    fixed: np.ndarray  # mask: the bytes of the structure
    keep: np.ndarray  # mask: everything except the varying numbers
    numbers: np.dtype  # fields named as in VARYING, at their offsets
    defines: bool  # whether such entries define memo numbers


#: Layouts from earlier files, by memo numbers of the keys and length: the ranks of a job write alike.
LayoutCache = defaultdict[tuple[tuple[tuple[int, str], ...], int], list[Layout]]


def tokens_of(data: bytes, start: int) -> tuple[list[Token], int]:
    """(opcodes of the entry at `start`, the position after it); offsets are relative to `start`."""
    tokens: list[Token] = []
    position, depth = start, 0
    while position < len(data):
        opcode = data[position]
        size, operand = _OPERANDS.get(opcode, -1), position + 1
        if opcode == TEXT:
            size, operand = int.from_bytes(data[position + 1 : position + 5], "little"), position + 5
        elif opcode == LONG1 and data[position + 1 : position + 2] == b"\x08":
            size, operand = 8, position + 2
        elif size < 0:
            raise Irregular(f"opcode {opcode}")
        position = operand + size
        tokens.append((opcode, operand - start, size))
        depth += (opcode == MARK) - (opcode in _CLOSING)
        if opcode == SET_ITEMS and depth == 0:
            return tokens, position
    raise Irregular("the entry does not end")


def learn(data: bytes, start: int, stop: int, keys: dict[int, str]) -> Layout:
    """The layout of the entry from `start` to `stop`. `keys`: memo number → key of VARYING."""
    tokens, end = tokens_of(data, start)
    if end != stop:
        raise Irregular("an entry does not end at the start of the next one")
    entry = data[start:stop]
    size_of_row = (len(entry) + 7) // 8 * 8
    template, fixed, keep = (np.zeros(size_of_row, np.uint8) for _ in range(3))
    template[: len(entry)] = np.frombuffer(entry, np.uint8)
    fixed[: len(entry)] = keep[: len(entry)] = 255
    numbers: dict[str, tuple[str, int]] = {}  # key → format and offset of its number
    for (opcode, operand, size), (next_opcode, offset, width) in zip(
        tokens, [*tokens[1:], (0, 0, 0)], strict=True
    ):
        key = keys.get(int.from_bytes(entry[operand : operand + size], "little")) if opcode in GETS else None
        if key is None:
            fixed[operand : operand + size] = 0
        elif next_opcode in _FORMATS and key not in numbers:
            numbers[key] = (_FORMATS[next_opcode], offset)
            keep[offset : offset + width] = 0
    formats, offsets = zip(*numbers.values(), strict=True) if numbers else ((), ())
    fields = np.dtype(
        {"names": list(numbers), "formats": formats, "offsets": offsets, "itemsize": size_of_row}
    )
    masks = (template.view(np.uint64), fixed.view(np.uint64), keep.view(np.uint64))
    return Layout(*masks, fields, any(opcode in PUTS for opcode, _, _ in tokens))


def find_entries(data: bytes) -> np.ndarray:
    """The bounds of the entries: entry i has the bytes from bounds[i] to bounds[i+1]."""
    opening = _OPENING.search(data)
    if data[:2] != b"\x80\x02" or opening is None:
        raise Irregular("not a pickle of torch")
    first = opening.end() - 1
    key = _first_key(data, first)
    getting = bytes((GETS[0], key)) if key < 256 else bytes((GETS[1],)) + key.to_bytes(4, "little")
    others = re.finditer(re.escape(b"}(" + getting), data[first + 1 :])
    starts = [first, *(first + 1 + other.start() for other in others)]
    _, last_end = tokens_of(data, starts[-1])
    return np.array([*starts, last_end])


def _keys_of_numbers(data: bytes) -> dict[int, str]:
    """Memo number → key, for the keys of VARYING in the file; the number follows the text."""
    keys = {}
    for name in VARYING:
        at = data.find(b"X" + len(name).to_bytes(4, "little") + name.encode())
        if at >= 0:
            put = at + 5 + len(name)
            size = {PUTS[0]: 1, PUTS[1]: 4}.get(data[put]) if put < len(data) else None
            if size is None:
                raise Irregular("key without a memo number")
            keys[int.from_bytes(data[put + 1 : put + 1 + size], "little")] = name
    return keys


def _first_key(data: bytes, start: int) -> int:
    """The memo number of the first key of every entry."""
    tokens, _ = tokens_of(data, start)
    (mark, *_), (opcode, *got), (put, *given) = tokens[1:4] if len(tokens) > 3 else [(0, 0, 0)] * 3
    if mark != MARK or (opcode not in GETS and not (opcode == TEXT and put in PUTS)):
        raise Irregular("first key without a memo number")
    place, width = got if opcode in GETS else given
    return int.from_bytes(data[start + place : start + place + width], "little")


@dataclass(frozen=True)
class Regular:
    """A small pickle that represents a large one.

    `entry_of[i]` is the index of the entry in the small pickle with the same pattern as entry i. `numbers` holds the values
    of all entries per key of VARYING; `has` marks the entries that have the key.
    """

    small: bytes
    small_count: int  # entries in it
    entry_of: np.ndarray
    numbers: dict[str, np.ndarray]
    has: dict[str, np.ndarray]

    def expand(self, calls: np.ndarray) -> np.ndarray:
        """The rows of all entries, from those of the small pickle."""
        if len(calls) != self.small_count:
            raise Irregular("a piece was not an entry")
        words = calls.view(np.uint64).reshape(len(calls), -1)  # numpy copies words faster than records
        full: np.ndarray = words[self.entry_of].view(CALL)[:, 0]
        for column, key in COLUMNS:
            rows, values = self.has[key], self.numbers[key]
            if column == "begin":
                values = np.maximum(values, 0)
            if rows.all():
                full[column] = values
            elif rows.any():
                full[column][rows] = values[rows]
        timed = self.has["duration_ms"] & self.has["time_discovered_completed_ns"]
        timed &= ~self.has["time_discovered_started_ns"]
        if timed.any():
            took_ns = np.nan_to_num(self.numbers["duration_ms"][timed] * 1e6, nan=0.0, posinf=0.0, neginf=0.0)
            took = np.clip(took_ns, 0, 1e18).astype(np.int64)
            full["started_ns"][timed] = full["completed_ns"][timed] - took
        return full


def shrink(data: bytes, cache: LayoutCache) -> Regular:
    """Finds the patterns of a dump's entries; raises Irregular."""
    bounds = find_entries(data)
    lengths = np.diff(bounds)
    if len(lengths) < 64 or lengths.max() > MAX_ENTRY_BYTES:
        raise Irregular("few entries, or very long ones")
    work = _Work(data, bounds, cache)
    for length, number in enumerate(np.bincount(lengths).tolist()):
        if number > FEW:
            work.sort_out(np.flatnonzero(lengths == length), length)
    chosen = np.unique(work.representative)
    if len(chosen) > 64 + MAX_PATTERN_SHARE * len(lengths):
        raise Irregular("too many patterns")
    ends = bounds.tolist()
    pieces = (data[ends[row] : ends[row + 1]] for row in chosen.tolist())
    small = b"".join([data[: ends[0]], *pieces, data[ends[-1] :]])
    entry_of = np.searchsorted(chosen, work.representative)
    return Regular(small, len(chosen), entry_of, work.numbers, work.has)


class _Work:
    """State while the entries of one file are grouped by pattern."""

    def __init__(self, data: bytes, bounds: np.ndarray, cache: LayoutCache) -> None:
        count = len(bounds) - 1
        self.data, self.bounds, self.cache = data, bounds, cache
        self.keys = _keys_of_numbers(data)
        self.signature = tuple(sorted(self.keys.items()))
        padded = np.zeros((len(data) + MAX_ENTRY_BYTES + 15) // 8 * 8, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        self.bytes = padded
        self.representative = np.arange(count)  # initially every entry represents itself
        self.numbers = {
            name: np.zeros(count, np.float64 if name == "duration_ms" else np.int64) for name in VARYING
        }
        self.has = {name: np.zeros(count, np.bool_) for name in VARYING}
        self.layouts = 0

    def sort_out(self, rows: np.ndarray, length: int) -> None:
        """Assigns layouts and representatives to all entries of one length."""
        words = (length + 7) // 8
        windows = np.lib.stride_tricks.as_strided(
            self.bytes, (len(self.bytes) - words * 8 + 1, words * 8), (1, 1), writeable=False
        )
        content = windows[self.bounds[rows]].view(np.uint64)
        known = self.cache[self.signature, length]
        for layout in known:
            if not len(rows):
                return
            rows, content = self._take(layout, rows, content)
        while len(rows):
            if self.layouts > MAX_LAYOUTS:
                raise Irregular("too many layouts")
            start, stop = int(self.bounds[rows[0]]), int(self.bounds[rows[0] + 1])
            layout = learn(self.data, start, stop, self.keys)
            self.layouts += 1
            if len(known) < MAX_LAYOUTS:
                known.append(layout)
            rows, content = self._take(layout, rows, content)

    def _take(self, layout: Layout, rows: np.ndarray, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Applies the layout to the rows that match it; returns the others."""
        different = content ^ layout.template
        different &= layout.fixed
        odd = different.any(axis=1)
        if odd.all():
            return rows, content
        mine, inside = (rows, content) if not odd.any() else (rows[~odd], content[~odd])
        if layout.defines:
            return rows[odd], content[odd]  # matching rows represent themselves
        self._match_patterns(layout, mine, inside)
        fields = inside.view(layout.numbers)[:, 0]
        for name in layout.numbers.names or ():
            self.numbers[name][mine] = fields[name]
            self.has[name][mine] = True
        return rows[odd], content[odd]

    def _match_patterns(self, layout: Layout, rows: np.ndarray, content: np.ndarray) -> None:
        """Makes the first entry of every pattern the representative of the others."""
        kept = content & layout.keep
        mixed = kept >> np.uint64(29)
        mixed ^= kept
        mixed *= _MULTIPLIERS[: kept.shape[1]]  # collisions are checked below
        hashes = mixed.sum(axis=1, dtype=np.uint64)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(kept[first[inverse]], kept):
            raise Irregular("two patterns share a hash")
        self.representative[rows] = rows[first[inverse]]


def _odd_numbers(count: int) -> np.ndarray:
    """Pseudo-random odd numbers (splitmix64); numpy.random is slow to import."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


_MULTIPLIERS = _odd_numbers(MAX_ENTRY_BYTES // 8)
