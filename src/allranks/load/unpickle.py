"""Reads pickles safely: plain data only, no code runs, and a truncated file returns the data before its end.

`read_pickle` first scans the opcodes. If all of them build plain data, the unpickler in C reads the file at full speed, with
all globals refused. A file that is truncated or contains a global is read by the unpickler in Python, in which every opcode
that could run code is replaced.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from dataclasses import dataclass
from typing import Any

#: Possessive repetition saves memory, because it does not backtrack; Python 3.10 lacks it.
_MANY = "*+" if sys.version_info >= (3, 11) else "{0,512}"
#: Errors that a damaged or hostile pickle may raise.
BROKEN = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, OverflowError, struct.error),
    *(LookupError, AttributeError, NameError, MemoryError, RecursionError, NotImplementedError),
)
#: Limits for opcodes and nested marks in Python's unpickler; a dump of 50,000 calls has 2.7 million opcodes, 10 deep.
MAX_STEPS, MAX_MARKS = 3_000_000, 1_000
#: Limit for lists and dictionaries: one byte of a pickle, or three of JSON, allocate 64.
MAX_CONTAINERS = 4_000_000
#: TUPLE1 to TUPLE3, and a limit for their bytes: the C unpickler crashes at about 150,000 nested tuples.
_TUPLES, MAX_TUPLES = (b"\x85", b"\x86", b"\x87"), 50_000
#: EMPTY_DICT, EMPTY_LIST; more consecutive marks than any dump has.
_CONTAINERS, _MARKS = (b"}", b"]"), b"(" * 64


@dataclass(frozen=True)
class Unpickled:
    """The unpickled value. `problem` is "" for an intact file."""

    value: object
    problem: str = ""
    whole: bool = True


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every global and every persistent id."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"the file contains the global {module}.{name}: refused")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("the file contains a persistent id: refused")


def read_pickle(data: bytes) -> Unpickled:
    """The plain data in a pickle. Does not raise for any content."""
    if sum(map(data.count, _CONTAINERS)) > MAX_CONTAINERS:
        return Unpickled(None, f"more than {MAX_CONTAINERS:,} lists and dictionaries: refused", whole=False)
    if is_plain(data):
        try:
            # without a buffered reader the C unpickler would read every opcode separately
            file = io.BufferedReader(io.BytesIO(data), max(1, len(data)))
            return Unpickled(_PlainUnpickler(file).load())
        except BROKEN:
            pass
    value, problem = salvage(data)
    return Unpickled(value, problem, not problem)


# -- damaged and hostile files ----------------------------------------------------------------------------------


class _Refused:
    """Replaces a global or the result of a call. Ignores everything that is added to it."""

    def __repr__(self) -> str:
        return "<refused>"

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    extend = add = append


REFUSED = _Refused()
#: The unpickler in Python. Its names are private, but unchanged since Python 3.4.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]
_Stop: Any = vars(pickle)["_Stop"]


class _Salvager(_PythonUnpickler):
    """Reads opcode by opcode, calls nothing, and keeps the data built before damage or the end of the file."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file, encoding="utf-8", errors="replace")
        self.size = len(data)
        self.problem = ""

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes; EOFError for fewer."""
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
        """(data that could be built, problem). The problem is "" only for an intact, harmless pickle."""
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
                where = f"truncated after {self.size} bytes"
            self.problem = self.problem or where
        return self._closed(), self.problem

    def _closed(self) -> Any:
        """The outermost container, after closing all open containers."""
        items = self.stack
        while self.metastack:
            outer = self.metastack.pop()
            if outer:
                _add_items(outer[-1], items)
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
        self.problem = self.problem or f"contains {what}, which was refused; no code was run"
        return REFUSED

    def _drop(self, count: int) -> None:
        del self.stack[len(self.stack) - count :]

    def _call(self, count: int) -> None:
        self._drop(count)
        self.append(self._refuse("a call"))

    def _set_items(self, items: list[Any]) -> None:
        _add_items(self.stack[-1], items)

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
    # these allocate or compute before they check their input, or hash deeply nested values
    for _code in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.LONG):
        del dispatch[_code[0]]
    for _code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]


def salvage(data: bytes) -> tuple[Any, str]:
    """(data that could be built, problem) for any bytes, without running code."""
    return _Salvager(data).salvage()


def _add_items(container: Any, items: list[Any]) -> None:
    """Adds items from the stack to a list or dictionary."""
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, dict):
        pairs = zip(items[::2], items[1::2], strict=False)
        container.update({key: value for key, value in pairs if isinstance(key, (str, int))})


def _safe(name: object) -> str:
    """A name from a hostile file, printable and short."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:80])


# -- harmless files ---------------------------------------------------------------------------------------------


def is_plain(data: bytes) -> bool:
    """Whether every opcode up to STOP builds plain data only, with memo numbers below the file size.

    The C unpickler allocates by memo number: one opcode with a large number would take gigabytes. Deeply nested tuples
    overflow the stack when they are hashed; dumps have few and short tuples.
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
    """A pattern that matches opcodes of fixed size. The third byte of a long memo number is limited by the file size."""
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
