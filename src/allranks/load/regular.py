"""Large pickles read faster than they can be unpickled: a dump repeats itself, two thousand times.

Entries differ in a few numbers and otherwise repeat a small set of byte patterns. So the entries are distinguished by
their bytes; one of each pattern, and those that define memo numbers, make a small pickle that the plain way reads;
the numbers of all others are taken from the bytes, a column at a time. Whatever looks unexpected raises Irregular,
and the plain way reads the whole file: the result is the same, only later.

torch and Python write every entry after the first with the same beginning: a dictionary, perhaps a memo number, a
mark, and the first key from the memo. An entry is `}` [put] `(` key value key value … `u`; keys are gets from the memo, or text
with a put the first time. Only opcodes that torch's and Python's picklers write for plain data are known, up to protocol 3: torch
writes 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from allranks.load.calls import NUMBERS
from allranks.model.trace import CALL

#: opcode → operand bytes; text and long numbers have their own lengths
_OPERANDS = {
    # containers, tuples, True, False, None
    **dict.fromkeys(b"}]()ueast\x85\x86\x87\x88\x89N", 0),
    **dict.fromkeys(b"Khq\x80", 1),  # BININT1, BINGET, BINPUT, PROTO
    **dict.fromkeys(b"M", 2),  # BININT2
    **dict.fromkeys(b"Jjr", 4),  # BININT, LONG_BINGET, LONG_BINPUT
    **dict.fromkeys(b"G", 8),  # BINFLOAT
}
PUTS, GETS = (0x71, 0x72), (0x68, 0x6A)
TEXT, LONG1, MARK, DICT, SET_ITEMS = 0x58, 0x8A, 0x28, 0x7D, 0x75
_CLOSING = (0x75, 0x65, 0x74)
_FORMATS = {0x4B: "u1", 0x4D: "<u2", 0x4A: "<i4", 0x8A: "<i8", 0x47: ">f8"}

#: keys whose values are numbers that differ from entry to entry
VARYING = (
    *("record_id", "collective_seq_id", "p2p_seq_id", "op_id", "duration_ms"),
    *("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"),
)

#: Below this many bytes the plain way is as fast.
MIN_BYTES = 16384
#: More patterns than this share of the entries, and nothing is gained.
MAX_PATTERN_SHARE = 0.5
MAX_LAYOUTS = 256
#: So few entries of one length are not worth a layout: they are read as they are.
FEW = 6
#: column of CALL ← key of VARYING
COLUMNS = tuple((column, key) for column, key in NUMBERS if key in VARYING)
MAX_ENTRY_BYTES = 4096
Token = tuple[int, int, int]  # opcode, operand offset, operand bytes


class Irregular(Exception):
    """The bytes are not laid out as expected; the plain way must read them."""


@dataclass(frozen=True)
class Layout:
    """What all entries share that equal `template` where `fixed` is set. Words are 8 bytes, the last one padded."""

    template: np.ndarray  # the words of the entry that it was learnt from
    fixed: np.ndarray  # mask: the bytes that give the structure
    keep: np.ndarray  # mask: everything but the varying numbers and the memo numbers of puts
    numbers: np.dtype  # fields named as in VARYING, at their offsets
    puts: tuple[tuple[int, int], ...]  # (offset, bytes) of the memo numbers that an entry defines
    gets: tuple[tuple[int, int], ...]  # (offset, bytes) of the memo numbers that it uses


#: Layouts learnt from earlier files, by key numbers and length: the ranks of a job write alike.
LayoutCache = defaultdict[tuple[tuple[tuple[int, str], ...], int], list[Layout]]


def scan(data: bytes, start: int, stop: int | None = None) -> Iterator[Token]:
    """The opcodes from `start` on, with offsets relative to it, until `stop` or the end of the bytes."""
    position, end = start, len(data) if stop is None else stop
    while position < end:
        opcode = data[position]
        size, operand = _OPERANDS.get(opcode, -1), position + 1
        if size < 0:
            if opcode == TEXT:
                size, operand = int.from_bytes(data[position + 1 : position + 5], "little"), position + 5
            elif opcode == LONG1 and data[position + 1 : position + 2] == b"\x08":
                size, operand = 8, position + 2
            else:
                raise Irregular(f"opcode {opcode}")
        position = operand + size
        if position > end:
            return
        yield opcode, operand - start, size


def tokens_of(data: bytes, start: int) -> tuple[list[Token], int]:
    """(the opcodes of the entry that starts at `start`, the position behind it); offsets are relative to `start`."""
    if data[start : start + 1] != b"}":
        raise Irregular("no dictionary")
    tokens: list[Token] = []
    depth = 0
    for token in scan(data, start):
        tokens.append(token)
        opcode = token[0]
        depth += (opcode == MARK) - (opcode in _CLOSING)
        if opcode == SET_ITEMS and depth == 0:
            return tokens, start + token[1] + token[2]
    raise Irregular("the entry does not end")


def between(data: bytes, start: int, stop: int) -> list[Token]:
    """The opcodes behind an entry, before the next: Python closes and reopens its list every thousand items."""
    tokens = list(scan(data, start, stop))
    if bytes(token[0] for token in tokens) not in (b"", b"e("):
        raise Irregular("something stands between two entries")
    return tokens


def learn(data: bytes, start: int, stop: int, keys: dict[int, str]) -> Layout:
    """The layout of the entry at `start`, whose piece of the file ends at `stop`. `keys`: memo number → VARYING key."""
    tokens, end = tokens_of(data, start)
    if end > stop:
        raise Irregular("an entry extends beyond its end")
    gap = between(data, end, stop)
    tokens += [(opcode, operand + end - start, size) for opcode, operand, size in gap]
    return _layout(data[start:stop], tokens, keys)


def _layout(entry: bytes, tokens: list[Token], keys: dict[int, str]) -> Layout:
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
        if opcode in PUTS:
            keep[operand : operand + size] = 0
    formats, offsets = zip(*numbers.values(), strict=True) if numbers else ((), ())
    fields = np.dtype(
        {"names": list(numbers), "formats": formats, "offsets": offsets, "itemsize": size_of_row}
    )
    masks = (template.view(np.uint64), fixed.view(np.uint64), keep.view(np.uint64))
    puts = tuple((operand, size) for opcode, operand, size in tokens if opcode in PUTS)
    gets = tuple((operand, size) for opcode, operand, size in tokens if opcode in GETS)
    return Layout(*masks, fields, puts, gets)


@dataclass(frozen=True)
class Entries:
    """Entry i is the bytes from bounds[i] to bounds[i+1], with what separates it from the next."""

    bounds: np.ndarray
    keys: dict[int, str]  # memo number → key, for the keys of VARYING


def find_entries(data: bytes) -> Entries:
    """Finds the entries. Raises Irregular when there are none of the expected form."""
    if len(data) < 64 or data[0] != 0x80 or data[1] > 3:
        raise Irregular("no pickle of torch")
    first = _first_entry(data)
    tokens, _ = tokens_of(data, first)
    keys = _keys_of_numbers(data)
    key = _first_key(data, first, tokens)
    getting = bytes((GETS[0], key)) if key < 256 else bytes((GETS[1],)) + key.to_bytes(4, "little")
    starts = _starts(data, first, getting, tokens[1][0])
    _, last_end = tokens_of(data, int(starts[-1]))
    return Entries(np.append(starts, last_end), keys)


def _first_entry(data: bytes) -> int:
    """Where the first entry starts: behind the key "entries", an empty list and a mark."""
    text = b"X\x07\x00\x00\x00entries"
    at = data.find(text)
    if at < 0:
        raise Irregular("no entries")
    position = at + len(text)
    sizes = {PUTS[0]: 2, PUTS[1]: 5}
    for expected in (b"]", b"(", b"}"):
        while position < len(data) and data[position] in sizes:
            position += sizes[data[position]]
        if data[position : position + 1] != expected:
            raise Irregular("entries are no list")
        position += 1
    return position - 1


def _keys_of_numbers(data: bytes) -> dict[int, str]:
    """Memo number → key, for the keys of VARYING that the file has; numbers stand behind the texts."""
    keys = {}
    for name in VARYING:
        at = data.find(b"X" + len(name).to_bytes(4, "little") + name.encode())
        if at >= 0:
            put = at + 5 + len(name)
            size = {PUTS[0]: 1, PUTS[1]: 4}.get(data[put]) if put < len(data) else None
            if size is None:
                raise Irregular("a key without a memo number")
            keys[int.from_bytes(data[put + 1 : put + 1 + size], "little")] = name
    return keys


def _first_key(data: bytes, start: int, tokens: list[Token]) -> int:
    """The memo number of the key that every entry begins with."""
    index = 2 if tokens[1][0] in PUTS else 1
    if len(tokens) < index + 3 or tokens[index][0] != MARK:
        raise Irregular("no mark")
    (opcode, *got), (put, *given) = tokens[index + 1 : index + 3]
    if opcode not in GETS and not (opcode == TEXT and put in PUTS):
        raise Irregular("no key with a memo number")
    place, width = got if opcode in GETS else given
    return int.from_bytes(data[start + place : start + place + width], "little")


def _starts(data: bytes, first: int, getting: bytes, second_opcode: int) -> np.ndarray:
    """The start of every entry."""
    content = np.frombuffer(data, np.uint8)
    opening = np.flatnonzero(content[first + 1 : max(first + 1, len(data) - 32)] == DICT) + (first + 1)
    mark = bytes((MARK,))
    if second_opcode in PUTS:
        short = opening[content[opening + 1] == PUTS[0]]
        long = opening[content[opening + 1] == PUTS[1]]
        found = np.union1d(
            _followed_by(content, short, 3, mark + getting), _followed_by(content, long, 6, mark + getting)
        )
    else:
        found = _followed_by(content, opening, 1, mark + getting)
    return np.concatenate([np.array([first], np.int64), found])


def _followed_by(content: np.ndarray, places: np.ndarray, gap: int, wanted: bytes) -> np.ndarray:
    """The places that have the wanted bytes `gap` bytes behind them."""
    for byte, expected in enumerate(wanted, start=gap):
        places = places[content[places + byte] == expected]
    return places


@dataclass(frozen=True)
class Regular:
    """A small pickle that stands for a large one.

    `entry_of[i]` is the place, among the small pickle's entries, of the one whose pattern entry i has. `numbers`
    holds, per key of VARYING, the true values of all entries where `has` says that there is one.
    """

    small: bytes
    small_count: int  # entries in it
    entry_of: np.ndarray
    numbers: dict[str, np.ndarray]
    has: dict[str, np.ndarray]

    def expand(self, calls: np.ndarray) -> np.ndarray:
        """The rows of all entries, given those of the small pickle's."""
        if len(calls) != self.small_count:
            raise Irregular("a piece was no entry")
        words = calls.view(np.uint64).reshape(len(calls), -1)  # copied far faster than records
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
    """Finds the patterns of a dump's entries. Raises Irregular when it is not such a file."""
    plan = find_entries(data)
    bounds = plan.bounds
    lengths = np.diff(bounds)
    if len(lengths) < 64 or lengths.max() > MAX_ENTRY_BYTES:
        raise Irregular("few entries, or very long ones")
    work = _Work(data, plan, cache)
    for length, number in enumerate(np.bincount(lengths).tolist()):
        if number > FEW:
            work.sort_out(np.flatnonzero(lengths == length), length)
        elif number:
            work.keep(np.flatnonzero(lengths == length))
    chosen = work.close_over_definitions()
    place = np.zeros(len(lengths), np.int64)
    place[chosen] = np.arange(len(chosen))
    small = work.small_pickle(chosen.tolist())
    return Regular(small, len(chosen), place[work.representative], work.numbers, work.has)


class _Work:
    """What piles up while the entries of one file are sorted by pattern."""

    def __init__(self, data: bytes, plan: Entries, cache: LayoutCache) -> None:
        count = len(plan.bounds) - 1
        self.data = data
        self.bounds = plan.bounds
        self.keys = plan.keys
        self.signature = tuple(sorted(plan.keys.items()))
        self.cache = cache
        padded = np.zeros((len(data) + MAX_ENTRY_BYTES + 15) // 8 * 8, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        self.bytes = padded
        self.representative = np.zeros(count, np.int64)
        self.numbers = {
            name: np.zeros(count, np.float64 if name == "duration_ms" else np.int64) for name in VARYING
        }
        self.has = {name: np.zeros(count, np.bool_) for name in VARYING}
        self.layout_of: list[tuple[Layout, np.ndarray]] = []
        self.kept: list[int] = []
        self.patterns = 0

    def keep(self, rows: np.ndarray) -> None:
        """Lets entries stand for themselves."""
        self.representative[rows] = rows
        self.kept += rows.tolist()
        self.patterns += len(rows)

    def sort_out(self, rows: np.ndarray, length: int) -> None:
        """Assigns a layout and a representative to all entries of one length."""
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
            if len(self.layout_of) > MAX_LAYOUTS:
                raise Irregular("too many layouts")
            start, stop = int(self.bounds[rows[0]]), int(self.bounds[rows[0] + 1])
            layout = learn(self.data, start, stop, self.keys)
            if len(known) < MAX_LAYOUTS:
                known.append(layout)
            rows, content = self._take(layout, rows, content)

    def _take(self, layout: Layout, rows: np.ndarray, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Uses the layout for the rows that have it; returns the others."""
        different = content ^ layout.template
        different &= layout.fixed
        odd = different.any(axis=1)
        if odd.all():
            return rows, content
        mine, inside = (rows, content) if not odd.any() else (rows[~odd], content[~odd])
        self._match_patterns(layout, mine, inside)
        fields = inside.view(layout.numbers)[:, 0]
        for name in layout.numbers.names or ():
            self.numbers[name][mine] = fields[name]
            self.has[name][mine] = True
        self.layout_of.append((layout, mine))
        return rows[odd], content[odd]

    def _match_patterns(self, layout: Layout, rows: np.ndarray, content: np.ndarray) -> None:
        """Finds the first entry of every pattern and makes it the representative of its equals."""
        kept = content & layout.keep
        mixed = kept >> np.uint64(29)
        mixed ^= kept
        if kept.shape[1] > len(_MULTIPLIERS):
            raise Irregular("an entry is very long")
        mixed *= _MULTIPLIERS[: kept.shape[1]]  # equality is checked below: nothing rests on the hash
        hashes = mixed.sum(axis=1, dtype=np.uint64)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(kept[first[inverse]], kept):
            raise Irregular("two patterns share a hash")
        self.patterns += len(first)
        if self.patterns > 64 + MAX_PATTERN_SHARE * len(self.representative):
            raise Irregular("too many patterns")
        self.representative[rows] = rows[first[inverse]]

    def close_over_definitions(self) -> np.ndarray:
        """The representatives, and every entry that defines a memo number which one of them uses; in file order."""
        wanted = np.zeros(len(self.representative), np.bool_)
        wanted[self.representative] = True
        owner, number = self._memo_numbers([(layout.puts, rows) for layout, rows in self.layout_of])
        if not len(owner):
            return np.flatnonzero(wanted)  # torch memoizes text and frames alone, where they first occur
        fresh = wanted.copy()
        for _ in range(8):
            uses = [(layout.gets, rows[fresh[rows]]) for layout, rows in self.layout_of]
            _, used = self._memo_numbers(uses)
            used = np.concatenate((used, self._maybe_used()))
            defining = owner[np.isin(number, np.unique(used))]
            fresh = np.zeros(len(wanted), np.bool_)
            fresh[defining] = True
            fresh &= ~wanted
            if not fresh.any():
                return np.flatnonzero(wanted)
            wanted |= fresh
        raise Irregular("definitions lean on one another")

    def small_pickle(self, chosen: list[int]) -> bytes:
        """The file with the chosen entries alone."""
        data, bounds = self.data, self.bounds.tolist()
        pieces = (data[bounds[row] : bounds[row + 1]] for row in chosen)
        return b"".join([data[: bounds[0]], *pieces, data[bounds[-1] :]])

    def _maybe_used(self) -> np.ndarray:
        """Memo numbers that the kept entries may use: whatever follows a byte that looks like a get."""
        found = [np.zeros(0, np.int64)]
        for row in self.kept:
            piece = self.bytes[int(self.bounds[row]) : int(self.bounds[row + 1]) + 4].astype(np.int64)
            short = np.flatnonzero(piece[:-4] == GETS[0])
            long = np.flatnonzero(piece[:-4] == GETS[1])
            words = [piece[long + 1 + byte] << (8 * byte) for byte in range(4)]
            found += [piece[short + 1], np.sum(words, axis=0, dtype=np.int64)]
        return np.concatenate(found)

    def _memo_numbers(
        self, places: list[tuple[tuple[tuple[int, int], ...], np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(entry, memo number) for the memo numbers that stand at the given (offset, bytes) of the given entries."""
        owners, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for spans, rows in places:
            if not spans or not len(rows):
                continue
            starts = self.bounds[rows]
            for size in (1, 4):
                offsets = np.array([offset for offset, width in spans if width == size], np.int64)
                if not len(offsets):
                    continue
                at = (starts[:, None] + offsets).ravel()
                value = self.bytes[at].astype(np.int64)
                for byte in range(1, size):
                    value |= self.bytes[at + byte].astype(np.int64) << (8 * byte)
                owners.append(np.repeat(rows, len(offsets)))
                numbers.append(value)
        return np.concatenate(owners), np.concatenate(numbers)


def _odd_numbers(count: int) -> np.ndarray:
    """Large odd numbers that look random (splitmix64); numpy.random would take long to import."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


_MULTIPLIERS = _odd_numbers(512)
