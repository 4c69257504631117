"""Pickles without their dangers: plain data only, nothing is ever called, and a cut file gives what it has.

`read_pickle` first scans the opcodes. Only those that build plain data pass; then C's unpickler, which would
refuse every global in any case, reads them at full speed. A file that is cut short or names a global is read by
the small machine in `salvage.py` instead.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from dataclasses import dataclass

from allranks.load.salvage import salvage

#: Possessive repetition keeps no way back for each opcode; Python 3.10 does not know it.
_MANY = "*+" if sys.version_info >= (3, 11) else "{0,512}"


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
    if is_plain(data):
        try:
            # Without a buffered reader C's unpickler would ask for every opcode by itself.
            file = io.BufferedReader(io.BytesIO(data), max(1, len(data)))
            return Unpickled(_PlainUnpickler(file).load())
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, OverflowError,
                UnicodeDecodeError, AttributeError, KeyError, MemoryError, RecursionError):  # fmt: skip
            pass
    value, problem = salvage(data)
    return Unpickled(value, problem, not problem)


def is_plain(data: bytes) -> bool:
    """Whether every opcode up to STOP only builds plain data, with memo numbers that fit the file's size.

    A memo number is an allocation in C's unpickler: one opcode with a large number would take gigabytes.
    """
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
            rb"(?:h.|q.|[\}\]\(\)ueast0\x85\x86\x87\x88\x89N\x94]|K.|M..|J....|j....|r..[\x00-"
            + high
            + rb"]\x00"
            rb"|\x8a\x08........|\x8a\x00|\x8a\x01.|\x8a\x02..|\x8a\x03...|\x8a\x04....|\x8a\x05.{5}|\x8a\x06.{6}"
            rb"|\x8a\x07.{7}|\x8a\x09.{9}|G........|\x80.|\x95........)" + _MANY.encode(),
            re.DOTALL,
        )
    return _patterns[third]
