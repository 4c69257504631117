"""The tables that all traces of one load share: names, sizes and stacks, each stored once.

A thousand ranks run the same program: they share a handful of stacks. Interning them over all files keeps
memory flat and lets `diagnose` compare indices instead of contents. Groups stay per trace, but equal groups
are one object, so that 16,384 ranks do not hold 16,384 copies of a member list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def name(self, text: str) -> int:
        """The index of a name."""
        found = self._name_ids.get(text)
        if found is None:
            text = text[:MAX_TEXT]
            found = self._name_ids.setdefault(text, len(self.names))
            if found == len(self.names):
                self.names.append(text)
        return found

    def shape(self, shapes: Shapes) -> int:
        """The index of sizes and dtypes."""
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

    def freeze(self) -> Frozen:
        """The tables as the tuples that traces hold."""
        return Frozen(tuple(self.names), tuple(self.shapes), tuple(self.stacks))


@dataclass(frozen=True)
class Frozen:
    """What all traces of one load have in common."""

    names: tuple[str, ...]
    shapes: tuple[Shapes, ...]
    stacks: tuple[tuple[Frame, ...], ...]


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    """Elements over all tensors, kept inside 63 bits."""
    total = 0
    for size in sizes:
        count = 1
        for extent in size:
            count *= extent
        total += count
    return total if -1 <= total < 1 << 63 else -1
