"""A small pickle machine for files that C's unpickler rightly refuses: cut short, or with something unsafe inside.

It knows the opcodes that build plain data. Globals, calls and everything else that could run code give an inert
`REFUSED` in place of the object. When the bytes end too early, whatever was being built is closed and returned.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_STEPS = 50_000_000


class _Refused:
    """Stands where the file wanted a global, or the result of calling one."""

    def __repr__(self) -> str:
        return "<refused>"


REFUSED = _Refused()
_MARK = object()


class _Cut(Exception):
    """The bytes end inside an opcode."""


def salvage(data: bytes) -> tuple[Any, str]:
    """(what could be built, what was wrong). The problem is '' only for a whole, harmless pickle."""
    machine = _Machine(data)
    try:
        machine.run()
    except _Cut:
        machine.problem = machine.problem or f"cut short after {len(data)} bytes"
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        struct.error,
        AttributeError,
    ) as error:
        machine.problem = machine.problem or f"damaged at byte {machine.position}: {type(error).__name__}"
    return machine.close(), machine.problem


class _Machine:
    """Stack, memo and position of one reading."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.problem = ""
        self.done = False
        self.result: Any = None

    def run(self) -> None:
        """Executes opcodes until STOP."""
        steps = 0
        while not self.done:
            opcode = self._take(1)[0]
            action = _ACTIONS.get(opcode)
            if action is None:
                raise ValueError(f"opcode {opcode}")
            action(self)
            steps += 1
            if steps > MAX_STEPS:
                raise ValueError("too long")

    def close(self) -> Any:
        """The finished value, or the outermost container with everything open put into it."""
        if self.done:
            return self.result
        items: list[Any] = []
        while len(self.stack) > 1:
            top = self.stack.pop()
            if top is not _MARK:
                items.append(top)
                continue
            items.reverse()
            _pour(self.stack[-1], items)
            items = []
        return self.stack[0] if self.stack and self.stack[0] is not _MARK else None

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _Cut
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise _Cut
        line = self.data[self.position : end]
        self.position = end + 1
        return line

    def _since_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise IndexError("no mark")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def _refuse(self, what: str) -> None:
        if not self.problem:
            self.problem = f"names {what}; refused, nothing was run"
        self.stack.append(REFUSED)


def _pour(container: Any, items: list[Any]) -> None:
    """Puts items that were still on the stack where they belong."""
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=False):
            if isinstance(key, (str, int)):
                container[key] = value


def _set_items(machine: _Machine) -> None:
    items = machine._since_mark()
    _pour(machine.stack[-1], items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _pour(machine.stack[-1], [key, value])


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _pour(machine.stack[-1], [value])


def _tuple(count: int) -> Any:
    def build(machine: _Machine) -> None:
        if count > len(machine.stack):
            raise IndexError("short stack")
        items = machine.stack[len(machine.stack) - count :]
        del machine.stack[len(machine.stack) - count :]
        machine.stack.append(tuple(items))

    return build


def _put(width: int) -> Any:
    def put(machine: _Machine) -> None:
        machine.memo[machine._number(width)] = machine.stack[-1]

    return put


def _get(width: int) -> Any:
    def get(machine: _Machine) -> None:
        machine.stack.append(machine.memo[machine._number(width)])

    return get


def _text(width: int, binary: bool = False) -> Any:
    def text(machine: _Machine) -> None:
        piece = machine._take(machine._number(width))
        machine.stack.append(piece if binary else piece.decode("utf-8", "replace"))

    return text


def _push(make: Any) -> Any:
    def push(machine: _Machine) -> None:
        machine.stack.append(make(machine))

    return push


def _long(width: int) -> Any:
    def long(machine: _Machine) -> None:
        machine.stack.append(int.from_bytes(machine._take(machine._number(width)), "little", signed=True))

    return long


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _stop(machine: _Machine) -> None:
    machine.result = machine.stack.pop()
    machine.done = True


def _global(machine: _Machine) -> None:
    module, name = machine._line(), machine._line()
    machine._refuse(f"the global {_safe(module)}.{_safe(name)}")


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine._refuse(f"the global {_safe(module)}.{_safe(name)}")


def _instance(machine: _Machine) -> None:
    module, name = machine._line(), machine._line()
    machine._since_mark()
    machine._refuse(f"the global {_safe(module)}.{_safe(name)}")


def _call(machine: _Machine) -> None:
    machine.stack.pop()
    machine.stack.pop()
    machine._refuse("a call")


def _call_with_keywords(machine: _Machine) -> None:
    machine.stack.pop()
    _call(machine)


def _object(machine: _Machine) -> None:
    machine._since_mark()
    machine._refuse("a class")


def _build(machine: _Machine) -> None:
    machine.stack.pop()


def _extension(width: int) -> Any:
    def extension(machine: _Machine) -> None:
        machine._number(width)
        machine._refuse("a registered extension")

    return extension


def _safe(name: object) -> str:
    """A name from a hostile file, fit for a sentence."""
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)[:80]
    return "".join(c if c.isprintable() else "?" for c in text[:80])


_ACTIONS: dict[int, Any] = {
    0x80: lambda m: m._take(1),  # PROTO
    0x95: lambda m: m._take(8),  # FRAME
    ord("."): _stop,
    ord("}"): _push(lambda m: {}),
    ord("]"): _push(lambda m: []),
    ord(")"): _push(lambda m: ()),
    ord("("): _push(lambda m: _MARK),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("K"): _push(lambda m: m._number(1)),
    ord("M"): _push(lambda m: m._number(2)),
    ord("J"): _push(lambda m: struct.unpack("<i", m._take(4))[0]),
    ord("G"): _push(lambda m: struct.unpack(">d", m._take(8))[0]),
    ord("I"): _push(lambda m: _ascii(m)),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("X"): _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    ord("B"): _text(4, binary=True),
    ord("C"): _text(1, binary=True),
    0x8E: _text(8, binary=True),
    ord("T"): _text(4),
    ord("U"): _text(1),
    ord("u"): _set_items,
    ord("s"): _set_item,
    ord("e"): lambda m: _pour_list(m),
    ord("a"): _append,
    ord("t"): lambda m: m.stack.append(tuple(m._since_mark())),
    ord("l"): lambda m: m.stack.append(list(m._since_mark())),
    ord("d"): lambda m: _dict(m),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("h"): _get(1),
    ord("j"): _get(4),
    0x94: _memoize,
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m._since_mark(),
    ord("c"): _global,
    0x93: _stack_global,
    ord("i"): _instance,
    ord("o"): _object,
    ord("R"): _call,
    0x81: _call,
    0x92: _call_with_keywords,
    ord("b"): _build,
    ord("P"): lambda m: m._refuse(f"the persistent id {_safe(m._line())}"),
    ord("Q"): lambda m: (m.stack.pop(), m._refuse("a persistent id")),
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
}


def _ascii(machine: _Machine) -> object:
    line = machine._line()
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > 20:
        raise ValueError("number too long")
    return int(line)


def _pour_list(machine: _Machine) -> None:
    items = machine._since_mark()
    _pour(machine.stack[-1], items)


def _dict(machine: _Machine) -> None:
    items = machine._since_mark()
    made: dict[Any, Any] = {}
    _pour(made, items)
    machine.stack.append(made)
