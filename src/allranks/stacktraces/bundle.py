"""The merged bundle: one JSON file with everything collected of a node or a job.

`bundle.json` holds frames and stacks once each and refers to them by index, so 1,024 ranks fit in a few
megabytes. A folder of bundles (one per node) is read as one capture. When `bundle.json` is damaged the raw
files beside it are read instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgspec

from allranks.blackbox.header import read_regular
from allranks.errors import InputError
from allranks.model.files import replacing
from allranks.model.parsing import convert
from allranks.model.stacks import (
    Capture,
    Mark,
    ProcessCapture,
    RankMarks,
    RasReply,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacktraces.raw_files import MAX_FILE_BYTES, is_known_name, read_by_content, read_raw

BUNDLE = "bundle.json"
KIND = "allranks stacks bundle"
VERSION = 1
Json: TypeAlias = dict[str, Any]
Row: TypeAlias = list[Any]
T = TypeVar("T")


def read_capture(path: str | Path, by_content: bool = True) -> Capture:
    """A capture from a bundle file, a folder with one, a folder of such folders, or raw files by hand; `by_content`: whatever
    these are called."""
    start = Path(path)
    if not start.exists():
        raise InputError(f"{start} does not exist")
    if start.is_file():
        return _decode(start)
    captures = [one for one in (_read_folder(folder) for folder in _folders(start)) if one is not None]
    if by_content:
        captures.append(read_by_content(_other_files(start)))
    if not any(capture.processes or capture.marks for capture in captures):
        raise InputError(
            f"no stack captures in {start}",
            hint="looked for bundle.json, rank{R}.pyspy.s1.json, rank{R}.proc.s1.json, pyspy_HOST_PID.txt and what py-spy, pystack, "
            "faulthandler or gdb printed, here and one folder down",
        )
    return join(captures, str(start))


def _folders(start: Path) -> Iterator[Path]:
    yield start
    if not (start / BUNDLE).exists():
        yield from sorted(folder for folder in start.iterdir() if folder.is_dir())


def _other_files(start: Path) -> Iterator[tuple[str, Path]]:
    """(name below the folder, path) of files that do not say by their name what they are, where no bundle is."""
    for folder in _folders(start):
        if not (folder / BUNDLE).exists():
            files = sorted(
                path for path in folder.iterdir() if path.is_file() and not is_known_name(path.name)
            )
            yield from ((str(path.relative_to(start)), path) for path in files)


def _read_folder(folder: Path) -> Capture | None:
    bundle = folder / BUNDLE
    if not bundle.exists():
        return read_raw(folder)
    try:
        return _decode(bundle)
    except InputError as error:
        raw = read_raw(folder)
        return replace(raw, notes=(*raw.notes, str(error)))


def join(captures: Iterable[Capture], path: str = "") -> Capture:
    """One capture of several nodes. The first process seen of a rank and child wins; the others are noted."""
    processes: dict[tuple[int, int], ProcessCapture] = {}
    marks: dict[int, RankMarks] = {}
    ras: list[RasReply] = []
    notes: list[str] = []
    world: int | None = None
    for capture in captures:
        for process in capture.processes:
            key = (process.rank, -1 if process.child is None else process.child)
            if key in processes and process.child is None:
                notes.append(
                    f"rank {process.rank} was captured twice ({processes[key].host}, {process.host})"
                )
            processes.setdefault(key, process)
        for one in capture.marks:
            marks.setdefault(one.rank, one)
        ras += capture.ras
        notes += capture.notes
        world = capture.world_size or world
    ordered = tuple(processes[key] for key in sorted(processes))
    return Capture(ordered, tuple(marks[r] for r in sorted(marks)), tuple(ras), world, tuple(notes), path)


# --- writing -------------------------------------------------------------------------------------------


@dataclass
class _Tables:
    """Frames and stacks seen so far, each once."""

    frames: dict[StackFrame, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def threads(self, stacks: Iterable[ThreadStack]) -> list[Row]:
        """Threads as rows that end in the number of their stack."""
        return [[one.tid, one.name, one.active, one.owns_gil, self._number(one.frames)] for one in stacks]

    def _number(self, frames: tuple[StackFrame, ...]) -> int:
        numbers = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(numbers, len(self.stacks))


def write_bundle(capture: Capture, folder: Path) -> Path:
    """Writes `bundle.json` so that a reader never sees half of it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / BUNDLE
    with replacing(final) as draft:
        draft.write_text(json.dumps(encode(capture), separators=(",", ":")), encoding="utf-8")
    return final


def encode(capture: Capture) -> Json:
    """The bundle as plain JSON data."""
    tables = _Tables()
    processes = [_encode_process(process, tables) for process in capture.processes]
    return {
        "kind": KIND,
        "schema": VERSION,
        "world_size": capture.world_size,
        "frames": [_row(frame) for frame in tables.frames],
        "stacks": [list(numbers) for numbers in tables.stacks],
        "processes": processes,
        "marks": [{**vars(one), "marks": [_row(mark) for mark in one.marks]} for one in capture.marks],
        "ras": [_row(one) for one in capture.ras],
        "notes": list(capture.notes),
    }


def _encode_process(process: ProcessCapture, tables: _Tables) -> Json:
    snapshots = [
        {
            "number": one.number,
            "at_s": one.at_s,
            "threads": tables.threads(one.stacks),
            "facts": [_row(fact) for fact in one.facts],
        }
        for one in process.snapshots
    ]
    return {**vars(process), "snapshots": snapshots, "native": tables.threads(process.native)}


def _row(one: StackFrame | ThreadFacts | Mark | RasReply) -> Row:
    """A dataclass as the values of its fields, in their order."""
    return list(vars(one).values())


# --- reading -------------------------------------------------------------------------------------------


def _decode(path: Path) -> Capture:
    """The capture of a bundle file; InputError says what is wrong with it."""
    try:
        row = json.loads(read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace"))
        if not isinstance(row, dict) or row.get("kind") != KIND:
            raise InputError(f"{path} is not a bundle of allranks stacks")
        if row.get("schema", 0) > VERSION:
            raise InputError(f"{path} has schema {row['schema']}, this version reads up to {VERSION}")
        return _decode_capture(row, str(path.parent))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {type(error).__name__}: {str(error)[:120]}") from error


def _decode_capture(row: Json, path: str) -> Capture:
    frames = _rows(StackFrame, row["frames"])
    stacks = [tuple(frames[number] for number in item) for item in row["stacks"]]
    return Capture(
        processes=tuple(_decode_process(item, stacks) for item in row["processes"]),
        marks=tuple(
            replace(_checked(RankMarks, {**item, "marks": ()}), marks=tuple(_rows(Mark, item["marks"])))
            for item in row["marks"]
        ),
        ras=tuple(_rows(RasReply, row.get("ras", ()))),
        world_size=row["world_size"] if isinstance(row.get("world_size"), int) else None,
        notes=_checked(tuple[str, ...], row.get("notes", ())),
        path=path,
    )


def _decode_process(item: Json, stacks: list[tuple[StackFrame, ...]]) -> ProcessCapture:
    def threads(rows: object) -> tuple[ThreadStack, ...]:
        found = _checked(list[tuple[int | None, str, bool | None, bool | None, int]], rows)
        return tuple(ThreadStack(tid, name, stacks[number], on, gil) for tid, name, on, gil, number in found)

    snapshots = tuple(
        replace(
            _checked(Snapshot, {"number": one["number"], "at_s": one.get("at_s")}),
            stacks=threads(one.get("threads", ())),
            facts=tuple(_rows(ThreadFacts, one.get("facts", ()))),
        )
        for one in item["snapshots"]
    )
    head = _checked(ProcessCapture, {**item, "snapshots": (), "native": ()})
    return replace(head, snapshots=snapshots, native=threads(item.get("native", ())))


def _checked(kind: type[T], value: object) -> T:
    """A value as its type; ValueError names the field that is wrong. Lax: 0 and 1 stand for flags in older files."""
    return convert(value, kind, strict=False)


def _rows(kind: type[T], rows: object) -> list[T]:
    """Dataclasses from the values of their fields, which the last ones of an older file may lack."""
    return [kind(*msgspec.structs.astuple(one)) for one in _checked(_row_type(kind), rows)]  # type: ignore[arg-type]


@lru_cache
def _row_type(kind: Any) -> Any:
    hints = get_type_hints(kind)
    columns = [
        (one.name, hints[one.name], *([] if one.default is MISSING else [one.default]))
        for one in fields(kind)
    ]
    return list[msgspec.defstruct(kind.__name__, columns, array_like=True)]  # type: ignore[misc]
