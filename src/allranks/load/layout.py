"""The bytes of a pickled dump: where its entries stand, and which bytes of an entry are numbers. Used by `regular.py`. Pure.

torch and Python write every entry after the first with the same beginning: a dictionary, perhaps a memo number, a
mark, and the first key from the memo. An entry is `}` [put] `(` key value key value … `u`; keys are gets from the memo, or text with a
put the first time. Only opcodes that torch's and Python's picklers write for plain data are known, up to protocol 3: torch writes 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

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
