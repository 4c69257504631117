"""Where the entries of a pickled dump stand, found by their first bytes. Used by `regular.py`. Pure.

torch and Python write every entry after the first with the same beginning: a dictionary, perhaps a memo number, a
mark, and the first key from the memo. Protocol 4 and later give memo numbers without naming them, and cut the stream
into frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allranks.load.layout import (
    DICT,
    FRAME,
    GETS,
    MARK,
    MEMOIZE,
    PUTS,
    SHORT_TEXT,
    TEXT,
    VARYING,
    Irregular,
    Token,
    scan,
    tokens_of,
)

_FRAME_BYTES = 9


@dataclass(frozen=True)
class Entries:
    """Entry i is the bytes from bounds[i] to bounds[i+1], with what separates it from the next."""

    bounds: np.ndarray
    keys: dict[int, str]  # memo number → key, for the keys of VARYING
    memoizing: bool  # memo numbers are given without being named
    memoized_before: int  # how many were given before the first entry


def find_entries(data: bytes) -> Entries:
    """Finds the entries. Raises Irregular when there are none of the expected form."""
    if len(data) < 64 or data[0] != 0x80:
        raise Irregular("no pickle")
    memoizing = data[1] >= 4
    first = _first_entry(data, memoizing)
    tokens, end = tokens_of(data, first)
    before = sum(token[0] == MEMOIZE for token in scan(data, 0, first)) if memoizing else 0
    if memoizing:
        numbers = _numbers_of_texts(data, first, tokens, before)
        if b"duration_ms" in data and b"duration_ms" not in data[first:end]:
            raise Irregular("a key whose memo number is not known")
    else:
        numbers = _numbers_of_keys(data)
    keys = {number: name for name, number in numbers.items() if name in VARYING}
    starts = _starts(data, first, _getting(_first_key(data, first, tokens, numbers, memoizing)), tokens[1][0])
    last = int(starts[-1])
    _, last_end = tokens_of(data, last)
    return Entries(np.append(starts, last_end), keys, memoizing, before)


def _first_entry(data: bytes, memoizing: bool) -> int:
    """Where the first entry starts: behind the key "entries", an empty list and a mark."""
    text = b"\x8c\x07entries" if memoizing else b"X\x07\x00\x00\x00entries"
    at = data.find(text)
    if at < 0:
        raise Irregular("no entries")
    position = at + len(text)
    for expected in (b"]", b"(", b"}"):
        position = _behind_put(data, position)
        if data[position : position + 1] != expected:
            raise Irregular("entries are no list")
        position += 1
    return position - 1


def _behind_put(data: bytes, position: int) -> int:
    """Skips memo numbers and frames."""
    sizes = {PUTS[0]: 2, PUTS[1]: 5, MEMOIZE: 1, FRAME: _FRAME_BYTES}
    while position < len(data) and data[position] in sizes:
        position += sizes[data[position]]
    return position


def _numbers_of_keys(data: bytes) -> dict[str, int]:
    """Key → memo number, for the keys of VARYING that the file has; numbers stand behind the texts."""
    numbers = {}
    for name in VARYING:
        at = data.find(b"X" + len(name).to_bytes(4, "little") + name.encode())
        if at >= 0:
            put = at + 5 + len(name)
            size = {PUTS[0]: 1, PUTS[1]: 4}.get(data[put]) if put < len(data) else None
            if size is None:
                raise Irregular("a key without a memo number")
            numbers[name] = int.from_bytes(data[put + 1 : put + 1 + size], "little")
    return numbers


def _numbers_of_texts(data: bytes, start: int, tokens: list[Token], count: int) -> dict[str, int]:
    """Text → memo number, for the texts in the first entry, by counting."""
    numbers: dict[str, int] = {}
    text = ""
    for opcode, operand, size in tokens:
        if opcode == MEMOIZE:
            if text:
                numbers.setdefault(text, count)
            count += 1
        if opcode != FRAME:
            is_text = opcode in (TEXT, SHORT_TEXT)
            text = (
                data[start + operand : start + operand + size].decode("utf-8", "replace") if is_text else ""
            )
    return numbers


def _first_key(data: bytes, start: int, tokens: list[Token], numbers: dict[str, int], memoizing: bool) -> int:
    """The memo number of the key that every entry begins with."""
    plain = [token for token in tokens[:8] if token[0] != FRAME]
    index = 2 if plain[1][0] in (*PUTS, MEMOIZE) else 1
    if len(plain) < index + 3 or plain[index][0] != MARK:
        raise Irregular("no mark")
    opcode, operand, size = plain[index + 1]
    text = data[start + operand : start + operand + size]
    if opcode in GETS:
        return int.from_bytes(text, "little")
    if opcode not in (TEXT, SHORT_TEXT):
        raise Irregular("no key")
    if memoizing:
        number = numbers.get(text.decode("utf-8", "replace"))
        if number is None:
            raise Irregular("a key without a memo number")
        return number
    put, place, width = plain[index + 2]
    if put not in PUTS:
        raise Irregular("a key without a memo number")
    return int.from_bytes(data[start + place : start + place + width], "little")


def _getting(number: int) -> bytes:
    """The opcode and operand that get a memo number."""
    return bytes((GETS[0], number)) if number < 256 else bytes((GETS[1],)) + number.to_bytes(4, "little")


def _starts(data: bytes, first: int, getting: bytes, second_opcode: int) -> np.ndarray:
    """The start of every entry."""
    content = np.frombuffer(data, np.uint8)
    opening = np.flatnonzero(content[first + 1 : max(first + 1, len(data) - 32)] == DICT) + (first + 1)
    mark = bytes((MARK,))
    if second_opcode == MEMOIZE:
        opening = opening[content[opening + 1] == MEMOIZE]
        framed = _followed_by(content, opening, 2, mark + bytes((FRAME,)))
        framed = _followed_by(content, framed, 3 + _FRAME_BYTES, getting)
        found = np.union1d(_followed_by(content, opening, 2, mark + getting), framed)
    elif second_opcode in PUTS:
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


def without_frames(piece: bytes) -> bytes:
    """The piece with the lengths of its frames set to nothing: they no longer hold once entries are left out."""
    if FRAME not in piece:
        return piece
    made = bytearray(piece)
    for opcode, operand, size in scan(piece, 0):
        if opcode == FRAME:
            made[operand : operand + size] = bytes(size)
    return bytes(made)
