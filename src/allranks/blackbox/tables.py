"""Tables of names, sizes and stacks that all traces of one load share.

Ranks of a job run the same program and share a few stacks. Interning them over all files saves memory and lets `diagnose`
compare indices instead of contents. Groups belong to a trace, but equal groups are one object, so that 16,384 ranks do not
hold 16,384 member lists. Heap items with the same bytes are decoded once per load.
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

MAX_TEXT = 4096  # characters of a name, because hostile files may hold megabytes
MAX_FRAMES = 512
MAX_MEMBERS = 1 << 20


@dataclass
class Tables:
    """Filled while files are read; `freeze()` returns the tuples that the traces share. Index 0 means none."""

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
        """Total elements of (inputs, outputs) of a shape; -1 unknown."""
        return self._shape_numel[shape]

    def frame(self, name: str, file: str, line: int) -> int:
        """The index of a frame, for `stack`."""
        key = (name, file, line)
        found = self._frame_ids.get(key)
        if found is None:
            found = self._frame_ids[key] = len(self._frames)
            self._frames.append(Frame(name[:MAX_TEXT], file[:MAX_TEXT], line))
        return found

    def stack(self, frames: tuple[int, ...]) -> int:
        """The index of a stack, given the indices of its frames, innermost first."""
        found = self._stack_ids.get(frames)
        if found is None:
            found = self._stack_ids[frames] = len(self.stacks)
            self.stacks.append(tuple(self._frames[number] for number in frames[:MAX_FRAMES]))
        return found

    def group(self, group: Group) -> Group:
        """The shared object for all equal groups."""
        return self._groups.setdefault(group, group)

    def freeze(self) -> tuple[tuple[str, ...], tuple[Shapes, ...], tuple[tuple[Frame, ...], ...]]:
        """(names, shapes, stacks) as tuples."""
        return tuple(self.names), tuple(self.shapes), tuple(self.stacks)


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    """Total elements of all tensors; -1 if the number exceeds 63 bits."""
    total = sum(map(prod, sizes))
    return total if -1 <= total < 1 << 63 else -1


_item_header = struct.Struct("<IHHI").unpack_from


@dataclass
class Heap:
    """The heap of one file. `ids` maps, per kind, ids of the file to indices in the tables."""

    ids: dict[int, dict[int, int]] = field(
        default_factory=lambda: {int(Item.NAME): {}, int(Item.SHAPES): {}, int(Item.STACK): {}}
    )
    bad: int = 0  # items that could not be read
    meta: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)  # native thread id -> name
    destroyed: dict[int, int] = field(default_factory=dict)  # the file's id of a group -> epoch nanoseconds

    def add(self, kind: int, number: int, value: Any) -> None:
        """Adds an item of a kind that is not in the tables."""
        if kind == Item.GROUP:
            self.groups[number] = value
        elif kind == Item.META:
            self.meta.update(value)
        else:
            table: dict[int, Any] = self.threads if kind == Item.THREAD else self.destroyed
            table[value[0]] = value[1]


def read_heap(data: bytes, tables: Tables) -> Heap:
    """Parses a heap, up to the first truncated or invalid item."""
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
            heap.bad += kind in _DECODERS  # ignores kinds of later versions
        elif kind in ids:
            ids[kind][number] = value
        else:
            heap.add(kind, number, value)
    return heap


def _decode(tables: Tables, kind: int, payload: bytes) -> Any:
    """An index into the tables, a Group, or the meta dictionary; None if unreadable."""
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


#: Kind -> decoder of an item's JSON; see `_decode`.
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
