"""Pickles without their dangers: plain data only, nothing is ever called, and a cut file gives what it has.

`read_pickle` first scans the opcodes. Only those that build plain data pass; then C's unpickler, which would
refuse every global in any case, reads them at full speed. A file that is cut short or names a global is read by
Python's own unpickler with every opcode that could run code replaced.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from dataclasses import dataclass
from typing import Any

#: Possessive repetition keeps no way back for each opcode; Python 3.10 does not know it.
_MANY = "*+" if sys.version_info >= (3, 11) else "{0,512}"
#: What a pickle that is damaged or means harm may raise.
BROKEN = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, OverflowError, struct.error),
    *(LookupError, AttributeError, NameError, MemoryError, RecursionError, NotImplementedError),
)
#: Opcodes that Python's unpickler takes, and marks inside one another; a dump of 50,000 calls has 2.7 million, 10 deep.
MAX_STEPS, MAX_MARKS = 3_000_000, 1_000
#: Lists and dictionaries: one byte of a pickle, or three of JSON, make an object of 64.
MAX_CONTAINERS = 4_000_000
#: TUPLE1 to TUPLE3, and how many bytes may look like them; C crashes at some 150,000 inside one another.
_TUPLES, MAX_TUPLES = (b"\x85", b"\x86", b"\x87"), 50_000


#: EMPTY_DICT, EMPTY_LIST, and so many marks in a row that no dump has.
_CONTAINERS, _MARKS = (b"}", b"]"), b"(" * 64


@dataclass(frozen=True)
class Unpickled:
    """What came out. `problem` is '' for a whole file; else what was wrong, as a sentence's beginning."""

    value: object
    problem: str = ""
    whole: bool = True


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every global and every persistent id."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"the file names the global {module}.{name}; refused, nothing was run")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("the file holds a persistent id; refused")


def read_pickle(data: bytes) -> Unpickled:
    """The plain data in a pickle. Never raises for any content."""
    if sum(map(data.count, _CONTAINERS)) > MAX_CONTAINERS:
        return Unpickled(None, f"more than {MAX_CONTAINERS:,} lists and dictionaries: refused", whole=False)
    if is_plain(data):
        try:
            # Without a buffered reader C's unpickler would ask for every opcode by itself.
            file = io.BufferedReader(io.BytesIO(data), max(1, len(data)))
            return Unpickled(_PlainUnpickler(file).load())
        except BROKEN:
            pass
    value, problem = salvage(data)
    return Unpickled(value, problem, not problem)


# -- files that C's unpickler rightly refuses -------------------------------------------------------------------


class _Refused:
    """Stands where the file wanted a global, or the result of calling one. Takes whatever is put into it."""

    def __repr__(self) -> str:
        return "<refused>"

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    extend = add = append


REFUSED = _Refused()
#: Python's unpickler, which is C's in Python; its names are not public, but the same since Python 3.4.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]
_Stop: Any = vars(pickle)["_Stop"]


class _Salvager(_PythonUnpickler):
    """Reads opcode by opcode, calls nothing, and keeps what was built when the bytes end or make no sense."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file, encoding="utf-8", errors="replace")
        self.size = len(data)
        self.problem = ""

    def read(self, count: int) -> bytes:
        """Exactly so many bytes: half a text must not be taken for a whole one."""
        data = self.file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def readline(self) -> bytes:
        line = self.file.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def salvage(self) -> tuple[Any, str]:
        """(what could be built, what was wrong). The problem is '' only for a whole, harmless pickle."""
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append, self.proto = self.stack.append, 0
        try:
            for _ in range(MAX_STEPS):
                self.dispatch[self.read(1)[0]](self)
            raise ValueError("too long")
        except _Stop as stop:
            return stop.value, self.problem
        except BROKEN as error:
            where = f"damaged at byte {self.file.tell()}: {type(error).__name__}"
            if isinstance(error, EOFError):
                where = f"cut short after {self.size} bytes"
            self.problem = self.problem or where
        return self._closed(), self.problem

    def _closed(self) -> Any:
        """The outermost container, with everything that was open put where it belongs."""
        items = self.stack
        while self.metastack:
            outer = self.metastack.pop()
            if outer:
                _pour(outer[-1], items)
            items = outer
        return items[0] if items else None

    def find_class(self, module: object, name: object) -> object:
        return self._refuse(f"the global {_safe(module)}.{_safe(name)}")

    def persistent_load(self, pid: object) -> object:
        return self._refuse("a persistent id")

    def get_extension(self, code: int) -> None:
        self.append(self._refuse("a registered extension"))

    def _instantiate(self, klass: object, args: object) -> None:
        self.append(REFUSED)

    def _refuse(self, what: str) -> object:
        self.problem = self.problem or f"names {what}; refused, nothing was run"
        return REFUSED

    def _drop(self, count: int) -> None:
        del self.stack[len(self.stack) - count :]

    def _call(self, count: int) -> None:
        self._drop(count)
        self.append(self._refuse("a call"))

    def _set_items(self, items: list[Any]) -> None:
        _pour(self.stack[-1], items)

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _mark(self) -> None:
        if len(self.metastack) > MAX_MARKS:
            raise ValueError("too many marks")
        self.load_mark()

    def _small_int(self) -> None:
        line = self.readline()[:-1]
        if len(line) > 20:
            raise ValueError("number too long")
        self.append(line == b"01" if line in (b"00", b"01") else int(line))

    dispatch = {
        **_PythonUnpickler.dispatch,
        pickle.REDUCE[0]: lambda self: self._call(2),
        pickle.NEWOBJ[0]: lambda self: self._call(2),
        pickle.NEWOBJ_EX[0]: lambda self: self._call(3),
        pickle.BUILD[0]: lambda self: self._drop(1),
        pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.DICT[0]: _make_dict,
        pickle.INT[0]: _small_int,
        pickle.MARK[0]: _mark,
        pickle.FRAME[0]: lambda self: self.read(8),  # a hint for readers that buffer
    }
    # These take memory or time before they look at what they have, or hash what a file has nested a million times.
    for _code in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.LONG):
        del dispatch[_code[0]]
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]


def salvage(data: bytes) -> tuple[Any, str]:
    """(what could be built, what was wrong) of any bytes; nothing in them is run."""
    return _Salvager(data).salvage()


def _pour(container: Any, items: list[Any]) -> None:
    """Puts items that were still on the stack where they belong."""
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, dict):
        pairs = zip(items[::2], items[1::2], strict=False)
        container.update({key: value for key, value in pairs if isinstance(key, (str, int))})


def _safe(name: object) -> str:
    """A name from a hostile file, fit for a sentence."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:80])


# -- which files are harmless -----------------------------------------------------------------------------------


def is_plain(data: bytes) -> bool:
    """Whether every opcode up to STOP only builds plain data, with memo numbers that fit the file's size.

    A memo number is an allocation in C's unpickler: one opcode with a large number would take gigabytes. Tuples that
    are nested deeply enough overflow the stack when they are used as a key: dumps have few, and short ones.
    """
    if sum(map(data.count, _TUPLES)) > MAX_TUPLES or _MARKS in data:
        return False
    skip = _skipper(len(data)).match
    position, end = 0, len(data)
    while position < end:
        match = skip(data, position)
        assert match is not None  # the pattern matches the empty string
        if match.end() != position:
            position = match.end()
            continue
        opcode = data[position]
        if opcode == 0x2E:  # STOP
            return True
        width = _TEXT_WIDTHS.get(opcode)
        if width is None or position + 1 + width > end:
            return False
        length = int.from_bytes(data[position + 1 : position + 1 + width], "little")
        position += 1 + width + length
    return False


#: BINUNICODE, SHORT_BINUNICODE, BINUNICODE8, BINBYTES, SHORT_BINBYTES, FRAME: opcode → bytes of its length field.
_TEXT_WIDTHS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1}
_patterns: dict[int, re.Pattern[bytes]] = {}


def _skipper(size: int) -> re.Pattern[bytes]:
    """A pattern that runs over opcodes of fixed size. The third byte of a long memo number is bounded by size."""
    third = min(255, size >> 16)
    if third not in _patterns:
        high = re.escape(struct.pack("B", third))
        _patterns[third] = re.compile(
            rb"(?:h.|q.|[\}\]\(\)ueas0\x85\x86\x87\x88\x89N\x94]|K.|M..|J....|j....|r..[\x00-"
            + high
            + rb"]\x00"
            rb"|\x8a\x08........|\x8a\x00|\x8a\x01.|\x8a\x02..|\x8a\x03...|\x8a\x04....|\x8a\x05.{5}|\x8a\x06.{6}"
            rb"|\x8a\x07.{7}|\x8a\x09.{9}|G........|\x80.|\x95........)" + _MANY.encode(),
            re.DOTALL,
        )
    return _patterns[third]
