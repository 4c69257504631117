"""The tables that all traces of one load share: names, sizes and stacks, each stored once.

A thousand ranks run the same program: they share a handful of stacks. Interning them over all files keeps
memory flat and lets `diagnose` compare indices instead of contents. Groups stay per trace, but equal groups
are one object, so that 16,384 ranks do not hold 16,384 copies of a member list.

The heap of a black box fills them. The ranks of a job write nearly the same items: each is decoded once per load, and known again
by its bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from math import prod
from typing import Any

from allranks.blackbox.layout import ITEM_HEADER_BYTES, Item
from allranks.model.trace import Frame, Group, Shapes

#: Longest text that is kept of a name; hostile files may hold megabytes.
MAX_TEXT = 4096
MAX_FRAMES = 512
MAX_MEMBERS = 1 << 20


@dataclass
class Tables:
    """Grows while files are read; `freeze()` gives the tuples that the traces share. Index 0 means none."""

    names: list[str] = field(default_factory=lambda: [""])
    shapes: list[Shapes] = field(default_factory=lambda: [Shapes()])
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    _name_ids: dict[str, int] = field(default_factory=lambda: {"": 0})
    _shape_ids: dict[Shapes, int] = field(default_factory=lambda: {Shapes(): 0})
    _stack_ids: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    _frames: list[Frame] = field(default_factory=list)
    _frame_ids: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _groups: dict[Group, Group] = field(default_factory=dict)
    _shape_numel: list[tuple[int, int]] = field(default_factory=lambda: [(-1, -1)])
    #: heap items by their bytes: see read_heap
    items: dict[bytes, Any] = field(default_factory=dict)

    def name(self, text: str) -> int:
        found = self._name_ids.get(text)
        if found is None:
            text = text[:MAX_TEXT]
            found = self._name_ids.setdefault(text, len(self.names))
            if found == len(self.names):
                self.names.append(text)
        return found

    def shape(self, shapes: Shapes) -> int:
        found = self._shape_ids.get(shapes)
        if found is None:
            found = self._shape_ids[shapes] = len(self.shapes)
            self.shapes.append(shapes)
            self._shape_numel.append((_numel(shapes.inputs), _numel(shapes.outputs)))
        return found

    def numel(self, shape: int) -> tuple[int, int]:
        """Elements over all (inputs, outputs) of a shape; -1 unknown."""
        return self._shape_numel[shape]

    def frame(self, name: str, file: str, line: int) -> int:
        """The number of a frame, for `stack`."""
        key = (name, file, line)
        found = self._frame_ids.get(key)
        if found is None:
            found = self._frame_ids[key] = len(self._frames)
            self._frames.append(Frame(name[:MAX_TEXT], file[:MAX_TEXT], line))
        return found

    def stack(self, frames: tuple[int, ...]) -> int:
        """The index of a stack, given its frames' numbers, innermost first."""
        found = self._stack_ids.get(frames)
        if found is None:
            found = self._stack_ids[frames] = len(self.stacks)
            self.stacks.append(tuple(self._frames[number] for number in frames[:MAX_FRAMES]))
        return found

    def group(self, group: Group) -> Group:
        """The one object that stands for all equal groups."""
        return self._groups.setdefault(group, group)

    def freeze(self) -> tuple[tuple[str, ...], tuple[Shapes, ...], tuple[tuple[Frame, ...], ...]]:
        """(names, shapes, stacks) as the tuples that traces hold."""
        return tuple(self.names), tuple(self.shapes), tuple(self.stacks)


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    """Elements over all tensors, kept inside 63 bits."""
    total = sum(map(prod, sizes))
    return total if -1 <= total < 1 << 63 else -1


_item_header = struct.Struct("<IHHI").unpack_from


@dataclass
class Heap:
    """One file's whole heap: per kind, the file's own id -> what it is; names, sizes and stacks by their index in the tables."""

    ids: dict[int, dict[int, int]] = field(
        default_factory=lambda: {int(Item.NAME): {}, int(Item.SHAPES): {}, int(Item.STACK): {}}
    )
    bad: int = 0  # items that could not be read
    meta: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)  # native thread id -> name
    #: the file's own id of a group -> epoch nanoseconds
    destroyed: dict[int, int] = field(default_factory=dict)

    def add(self, kind: int, number: int, value: Any) -> None:
        """An item that is not in the tables."""
        if kind == Item.GROUP:
            self.groups[number] = value
        elif kind == Item.META:
            self.meta.update(value)
        else:
            table: dict[int, Any] = self.threads if kind == Item.THREAD else self.destroyed
            table[value[0]] = value[1]


def read_heap(data: bytes, tables: Tables) -> Heap:
    """What the bytes of a heap hold, up to where they are cut or make no sense."""
    heap, items = Heap(), tables.items
    ids = heap.ids
    position, end = 0, len(data)
    while position + ITEM_HEADER_BYTES <= end:
        length, kind, _, number = _item_header(data, position)
        behind = position + ITEM_HEADER_BYTES + length
        if behind > end:
            break
        item = data[position:behind]
        position = (behind + 7) & ~7
        value = items.get(item)
        if value is None:
            value = items[item] = _decode(tables, kind, item[ITEM_HEADER_BYTES:])
        if value is None:
            heap.bad += kind in _DECODERS  # a kind of a later version is not ours to judge
        elif kind in ids:
            ids[kind][number] = value
        else:
            heap.add(kind, number, value)
    return heap


def _decode(tables: Tables, kind: int, payload: bytes) -> Any:
    """An index into the tables, a Group, or the meta dictionary; None when unreadable."""
    try:
        return _DECODERS[kind](tables, json.loads(payload))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return None


def _shapes(tables: Tables, value: Any) -> Any:
    sizes, words = [_lists(part) for part in value[:2]], [tuple(map(str, part)) for part in value[2:4]]
    splits = [tuple(map(int, part or ())) for part in (*value[4:6], (), ())[:2]]
    return tables.shape(Shapes(sizes[0], sizes[1], words[0], words[1], splits[0], splits[1]))


def _group(tables: Tables, value: Any) -> Any:
    name, desc, ranks, backend, *met = value
    parts = (range(*part)[:MAX_MEMBERS] if isinstance(part, list) else (int(part),) for part in ranks)
    members = tuple(islice(chain.from_iterable(parts), MAX_MEMBERS))
    words = (str(name)[:MAX_TEXT], str(desc)[:MAX_TEXT], members, str(backend)[:64])
    return tables.group(Group(*words, *((str(met[0])[:MAX_TEXT], int(met[1])) if met else ())))


def _stack(tables: Tables, value: Any) -> Any:
    return tables.stack(tuple(tables.frame(str(n), str(f), int(line)) for n, f, line in value))


#: An item's JSON as an index into the shared tables (or a Group, or the meta dictionary); None when it is none.
_DECODERS: dict[int, Callable[[Tables, Any], Any]] = {
    Item.NAME: lambda tables, value: tables.name(value) if isinstance(value, str) else None,
    Item.STACK: _stack,
    Item.THREAD: lambda tables, value: (int(value[0]), str(value[1])[:MAX_TEXT]),
    Item.DESTROYED: lambda tables, value: (int(value[0]), int(value[1])),
    Item.SHAPES: _shapes,
    Item.GROUP: _group,
    Item.META: lambda tables, value: value if isinstance(value, dict) else None,
}


def _lists(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(extent) for extent in size) for size in value)
