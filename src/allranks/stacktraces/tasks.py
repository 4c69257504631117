"""The suspended coroutines of a live process: a tool that reads stacks of threads sees only the event loop that waits.

Reads memory through /proc/PID/mem and stops nothing: every coroutine object is found by its type's address, and its code, line
and what it awaits are read from it. Knows the layouts of CPython 3.11 to 3.13; of others it returns nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allranks.model.stacks import StackFrame, is_user_file
from allranks.stacktraces.procfs import Peek, memory_of, read_proc

MAX_BYTES = 1 << 30  # of memory that is searched
MAX_TASKS = 2000
_PYTHON = re.compile(r"/(?:lib)?python(3)\.(\d+)[^/]*$")


@dataclass(frozen=True)
class _Layout:
    """Offsets in a coroutine object, its frame and its code; checked against the headers of each version."""

    state: int
    frame: int
    code: int
    adaptive: int
    first_line: int
    suspended: tuple[int, ...]
    text: int  # characters of an ASCII string
    instruction: int = 56
    stack_top: int = 64
    locals: int = 72
    file: int = 112
    name: int = 128
    lines: int = 136


_LAYOUTS = {
    11: _Layout(75, 80, 32, 184, 72, (-1,), 48),
    12: _Layout(67, 72, 0, 192, 68, (-1,), 40),
    13: _Layout(67, 72, 0, 200, 68, (-2, -1), 40),
}


@dataclass(frozen=True)
class Coroutine:
    """A suspended coroutine: where it is, the object that it awaits, and how long it waits at most."""

    frame: StackFrame
    awaits: int
    limit_s: float | None = None


def read_tasks(pid: int) -> list[tuple[tuple[StackFrame, ...], float | None]]:
    """(frames, innermost first; seconds that it waits at most) of every chain of suspended coroutines."""
    with memory_of(pid) as peek:
        found = dict(_coroutines(pid, peek))
    awaited = {one.awaits for one in found.values()}
    chains = []
    for address in found.keys() - awaited:
        chain = [found[address]]
        while chain[-1].awaits in found and len(chain) < 100:
            chain.append(found[chain[-1].awaits])
        limits = [one.limit_s for one in chain if one.limit_s is not None]
        chains.append((tuple(one.frame for one in reversed(chain)), min(limits, default=None)))
    return chains[:MAX_TASKS]


def chain_of_program(
    chains: Sequence[tuple[StackFrame, ...]], loop: Sequence[StackFrame]
) -> tuple[StackFrame, ...]:
    """Of suspended chains the one that the program waits for: the only one with a line of its own, or the one whose first
    function the line names that runs the loop, as `asyncio.run(main())` does; () where neither tells."""
    starts = next((frame.source for frame in loop if is_user_file(frame.file)), "")
    own = {c: [f.name for f in c if is_user_file(f.file)][-1:] for c in chains}
    found = [chain for chain, names in own.items() if names]
    if len(found) > 1:
        found = [chain for chain in found if re.search(rf"\b{re.escape(own[chain][0])}\(", starts)]
    return found[0] if len(found) == 1 else ()


def _coroutines(pid: int, peek: Peek) -> Iterator[tuple[int, Coroutine]]:
    symbols, layout = _symbols(pid)
    wanted = symbols.get("PyCoro_Type")
    if layout is None or wanted is None:
        return
    left = MAX_BYTES
    for start, size in _heaps(pid):
        if size > left:
            break
        left -= size
        data = peek(start, size)
        words = np.frombuffer(data, "<u8", len(data) // 8)
        for index in np.flatnonzero(words == wanted).tolist():
            if (one := _read(peek, data, 8 * (index - 1), layout, symbols)) is not None:
                yield start + 8 * (index - 1), one


def _heaps(pid: int) -> Iterator[tuple[int, int]]:
    for line in read_proc(pid, "maps").splitlines():
        words = line.split(None, 5)
        if words[1].startswith("rw") and words[1].endswith("p") and (len(words) < 6 or words[5] == "[heap]"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            yield first, last - first


def _read(peek: Peek, data: bytes, at: int, layout: _Layout, symbols: dict[str, int]) -> Coroutine | None:
    """The coroutine at an offset of the data; None when it is none, or not suspended."""
    frame = at + layout.frame
    if at < 0 or frame + layout.locals + 8 > len(data):
        return None
    references, state = (
        struct.unpack_from("<q", data, at)[0],
        struct.unpack_from("b", data, at + layout.state)[0],
    )
    if state not in layout.suspended or not 0 < references < 1 << 32:
        return None
    code, instruction = (
        struct.unpack_from("<Q", data, frame + layout.code)[0],
        struct.unpack_from("<Q", data, frame + layout.instruction)[0],
    )
    top = struct.unpack_from("<i", data, frame + layout.stack_top)[0]
    head = peek(code, layout.adaptive)
    if len(head) < layout.adaptive or not 0 < top < 10_000:
        return None
    file, name = (
        _text(peek, struct.unpack_from("<Q", head, where)[0], layout) for where in (layout.file, layout.name)
    )
    table = _bytes(peek, struct.unpack_from("<Q", head, layout.lines)[0])
    first = struct.unpack_from("<i", head, layout.first_line)[0]
    if not file or not name:
        return None
    line = line_at(table, first, (instruction - code - layout.adaptive) // 2)
    slot = frame + layout.locals + 8 * (top - 1)
    awaits = struct.unpack_from("<Q", data, slot)[0] if slot + 8 <= len(data) else 0
    limit, argument = None, _LIMITS.get(name) if file.endswith("asyncio/tasks.py") else None
    if argument is not None:
        where = frame + layout.locals + 8 * argument
        limit = _number(peek, struct.unpack_from("<Q", data, where)[0], symbols)
    return Coroutine(StackFrame(name, file, line), awaits, limit)


#: Functions of asyncio that end by themselves, and which argument says when.
_LIMITS = {"sleep": 0, "wait_for": 1}


def _text(peek: Peek, address: int, layout: _Layout) -> str:
    head = peek(address, layout.text)
    length = struct.unpack_from("<q", head, 16)[0] if len(head) == layout.text else 0
    data = peek(address + layout.text, length) if 0 < length < 4096 else b""
    return data.decode("ascii", "replace") if b"\0" not in data else ""


def _bytes(peek: Peek, address: int) -> bytes:
    head = peek(address, 24)
    length = struct.unpack_from("<q", head, 16)[0] if len(head) == 24 else 0
    return peek(address + 32, length) if 0 < length < 1 << 20 else b""


def _number(peek: Peek, address: int, symbols: dict[str, int]) -> float | None:
    """A float or a small int."""
    data = peek(address, 32)
    if len(data) < 32:
        return None
    kind = struct.unpack_from("<Q", data, 8)[0]
    if kind == symbols.get("PyFloat_Type"):
        return float(struct.unpack_from("<d", data, 16)[0])
    return float(struct.unpack_from("<I", data, 24)[0]) if kind == symbols.get("PyLong_Type") else None


def line_at(table: bytes, first: int, index: int) -> int:
    """The line of an instruction, from a code object's table of locations (PEP 626)."""
    at, covered, line = 0, 0, first
    while at < len(table):
        kind, length = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        if kind == 14 or kind == 13:
            value, shift = 0, 0
            while True:
                byte = table[at]
                at += 1
                value |= (byte & 63) << shift
                shift += 6
                if not byte & 64:
                    break
            line += -(value >> 1) if value & 1 else value >> 1
        elif 10 <= kind <= 12:
            line += kind - 10
        while at < len(table) and not table[at] & 128:
            at += 1
        covered += length
        if index < covered:
            return line
    return line


def _symbols(pid: int) -> tuple[dict[str, int], _Layout | None]:
    """Addresses of the interpreter's types in a process, and its layout."""
    for line in read_proc(pid, "maps").splitlines():
        words = line.split(None, 5)
        match = _PYTHON.search(words[5]) if len(words) > 5 and words[2] == "00000000" else None
        if match is not None:
            base = int(words[0].split("-")[0], 16)
            found = _elf_symbols(
                Path(f"/proc/{pid}/root{words[5]}"), ("PyCoro_Type", "PyFloat_Type", "PyLong_Type"), base
            )
            if found:
                return found, _LAYOUTS.get(int(match[2]))
    return {}, None


def _elf_symbols(path: Path, names: tuple[str, ...], base: int) -> dict[str, int]:
    """Addresses of exported symbols of a 64-bit ELF file that is loaded at `base`."""
    found = {}
    try:
        with path.open("rb") as file:
            head = file.read(64)
            if head[:5] != b"\x7fELF\x02":
                return {}
            moved = base if struct.unpack_from("<H", head, 16)[0] == 3 else 0  # shared object or PIE
            table = struct.unpack_from("<Q", head, 40)[0]
            size, count = struct.unpack_from("<HH", head, 58)
            file.seek(table)
            rows: list[tuple[int, ...]] = []
            rows += [struct.unpack("<IIQQQQIIQQ", file.read(64)) for _ in range(count) if size == 64]
            for row in rows:
                if row[1] == 11:  # dynamic symbols; row[6]: their names
                    file.seek(rows[row[6]][4])
                    text = file.read(rows[row[6]][5])
                    file.seek(row[4])
                    entries: Any = np.frombuffer(
                        file.read(row[5]),
                        [("name", "<u4"), ("info", "V4"), ("value", "<u8"), ("size", "<u8")],
                    )
                    for name in names:
                        where = text.find(b"\0" + name.encode() + b"\0") + 1
                        values = entries["value"][entries["name"] == where] if where else []
                        if len(values):
                            found[name] = int(values[0]) + moved
    except (OSError, struct.error, ValueError, IndexError):
        return {}
    return found
