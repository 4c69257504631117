"""Stacks as the cards of a page, with the code around the line where a rank is, if its file is on this machine."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

AROUND = 4  # lines of code before and after
MAX_FRAMES = 14
MAX_SOURCE_BYTES = 4 << 20
MAX_LINE = 200

#: What is said of a stack besides its label.
NOTES = {"last finished call": "This is where it made its last finished call, not where it is now."}


@dataclass(frozen=True)
class FrameLine:
    """One frame as it is shown."""

    name: str
    file: str
    line: int
    library: bool = False


@dataclass(frozen=True)
class Source:
    """A piece of a source file: (line number, text, whether it is the line meant)."""

    title: str
    lines: tuple[tuple[int, str, bool], ...]


@dataclass(frozen=True)
class StackCard:
    """A stack with its heading."""

    title: str
    label: str
    mood: str  # "bad", "warn", "good" or ""
    frames: tuple[FrameLine, ...]
    guilty: bool = False
    note: str = ""
    source: Source | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: tuple[str, ...]
    mood: str = ""


def stack_card(ranks: tuple[int, ...], lines: tuple[FrameLine, ...], label: str, guilty: bool) -> StackCard:
    """The card of ranks that share a stack; a guilty rank's shows its code too."""
    title = f"Rank{'s' if len(ranks) > 1 else ''} {short(ranks)}"
    if not guilty:
        return StackCard(title, "waiting", "warn", lines)
    note = NOTES.get(label, "")
    shown = f"{label} stack" if label == "live" else label or "stack"
    return StackCard(title, shown, "warn" if note else "bad", lines, True, note, read_source(lines))


def short(ranks: tuple[int, ...]) -> str:
    """ "0-7, 9" with at most a dozen runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        str(low) if low == high else f"{low}-{high}" if high - low > 1 else f"{low}, {high}"
        for low, high in runs
    ]
    return ", ".join(parts[:12]) + (f", … ({len(ranks)} in all)" if len(parts) > 12 else "")


def frame_lines(frames: Iterable[tuple[str, str, int]]) -> tuple[FrameLine, ...]:
    """(name, file, line) of each frame, innermost first; in long stacks frames of libraries are left out."""
    lines = [FrameLine(name, file, line, is_library(file)) for name, file, line in frames]
    room = MAX_FRAMES - sum(not frame.library for frame in lines)
    kept = []
    for frame in lines:
        room -= frame.library
        if not frame.library or room >= 0:
            kept.append(frame)
    return tuple(kept[: 3 * MAX_FRAMES])


def is_library(file: str) -> bool:
    """Whether a frame is of torch, of Python itself, of another installed package or of our own."""
    return file[:1] in ("", "<") or any(part in file for part in _LIBRARIES)


_LIBRARIES = (
    "/torch/",
    "site-packages",
    "dist-packages",
    "/lib/python3",
    "frozen ",
    "/allranks/record/",
    "/allranks/launch/",
    "/allranks/manager/",
)


def without_stale(cards: Iterable[StackCard]) -> list[StackCard]:
    """Leaves out where a rank was when it is known where it is."""
    found = list(cards)
    live = {card.title for card in found if card.label == "live stack"}
    return [card for card in found if card.title not in live or card.label == "live stack" or not card.guilty]


def read_source(frames: Sequence[FrameLine]) -> Source | None:
    """The code around the innermost line of the user's own; None when its file is not here."""
    frame = next((f for f in frames if not f.library), None)
    if frame is None or not frame.file.endswith(".py") or frame.line < 1:
        return None
    try:
        if not Path(frame.file).is_file() or Path(frame.file).stat().st_size > MAX_SOURCE_BYTES:
            return None
    except (OSError, ValueError):
        return None
    linecache.checkcache(frame.file)
    text = linecache.getlines(frame.file)
    if frame.line > len(text):
        return None
    low, high = max(1, frame.line - AROUND), min(len(text), frame.line + AROUND)
    lines = [
        (number, text[number - 1].rstrip()[:MAX_LINE], number == frame.line)
        for number in range(low, high + 1)
    ]
    return Source(f"{frame.file}:{frame.line}", tuple(lines))
