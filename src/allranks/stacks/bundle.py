"""The merged bundle: one JSON file with everything collected of a node or a job.

`bundle.json` holds frames and stacks once each and refers to them by index, so 1,024 ranks fit in a few
megabytes. A folder of bundles (one per node) is read as one capture. When `bundle.json` is damaged the raw
files beside it are read instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.errors import InputError
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
from allranks.stacks.raw_files import read_raw

BUNDLE = "bundle.json"
KIND = "allranks stacks bundle"
VERSION = 1
Json = dict[str, object]


def read_capture(path: str | Path) -> Capture:
    """A capture from a bundle file, a folder with one, a folder of such folders, or raw files by hand."""
    start = Path(path)
    if not start.exists():
        raise InputError(f"{start} does not exist")
    if start.is_file():
        return _decode(start)
    captures = [one for one in (_read_folder(folder) for folder in _folders(start)) if one is not None]
    if not any(capture.processes or capture.marks for capture in captures):
        raise InputError(
            f"no stack captures in {start}",
            hint="looked for bundle.json, rank{R}.pyspy.s1.json, rank{R}.pyspy.txt, rank{R}.proc.s1.json and pyspy_HOST_PID.txt, "
            "here and one folder down",
        )
    return join(captures, str(start))


def _folders(start: Path) -> Iterator[Path]:
    yield start
    if not (start / BUNDLE).exists():
        yield from sorted(folder for folder in start.iterdir() if folder.is_dir())


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

    def stack(self, frames: tuple[StackFrame, ...]) -> int:
        numbers = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(numbers, len(self.stacks))


def write_bundle(capture: Capture, folder: Path) -> Path:
    """Writes `bundle.json` so that a reader never sees half of it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / BUNDLE
    partial = folder / f".{BUNDLE}.{os.getpid()}"
    partial.write_text(json.dumps(encode(capture), separators=(",", ":")), encoding="utf-8")
    os.replace(partial, final)
    return final


def encode(capture: Capture) -> Json:
    """The bundle as plain JSON data."""
    tables = _Tables()
    processes = [_encode_process(process, tables) for process in capture.processes]
    return {
        "kind": KIND,
        "schema": VERSION,
        "world_size": capture.world_size,
        "frames": [[f.name, f.file, f.line, int(f.native), f.source] for f in tables.frames],
        "stacks": [list(numbers) for numbers in tables.stacks],
        "processes": processes,
        "marks": [_encode_marks(one) for one in capture.marks],
        "ras": [[one.address, one.at_s, one.text] for one in capture.ras],
        "notes": list(capture.notes),
    }


def _encode_process(process: ProcessCapture, tables: _Tables) -> Json:
    return {
        "rank": process.rank,
        "child": process.child,
        "pid": process.pid,
        "host": process.host,
        "title": process.title,
        "snapshots": [_encode_snapshot(one, tables) for one in process.snapshots],
        "native": [_encode_stack(one, tables) for one in process.native],
        "kernels": list(process.kernels),
        "notes": list(process.notes),
        "parallel": [list(pair) for pair in process.parallel],
    }


def _encode_snapshot(one: Snapshot, tables: _Tables) -> Json:
    return {
        "number": one.number,
        "at_s": one.at_s,
        "threads": [_encode_stack(stack, tables) for stack in one.stacks],
        "facts": [
            [
                f.tid,
                f.comm,
                f.state,
                f.wchan,
                f.syscall,
                list(f.args),
                f.ticks,
                list(f.kernel_stack),
                f.mutex_owner,
            ]
            for f in one.facts
        ],
    }


def _encode_stack(stack: ThreadStack, tables: _Tables) -> list[object]:
    return [stack.tid, stack.name, stack.active, stack.owns_gil, tables.stack(stack.frames)]


def _encode_marks(one: RankMarks) -> Json:
    return {
        "rank": one.rank,
        "seen_s": one.seen_s,
        "expect_until_s": one.expect_until_s,
        "closed": one.closed,
        "marks": [[mark.at_s, mark.step, mark.phase, mark.calls] for mark in one.marks],
    }


# --- reading -------------------------------------------------------------------------------------------


def _decode(path: Path) -> Capture:
    """The capture of a bundle file; InputError says what is wrong with it."""
    try:
        row = json.loads(path.read_bytes().decode("utf-8", "replace"))
        if not isinstance(row, dict) or row.get("kind") != KIND:
            raise InputError(f"{path} is not a bundle of allranks stacks")
        if row.get("schema", 0) > VERSION:
            raise InputError(f"{path} has schema {row['schema']}, this version reads up to {VERSION}")
        return _decode_row(row, str(path.parent))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {type(error).__name__}: {str(error)[:120]}") from error


def _decode_row(row: dict[str, list[list[object]]], path: str) -> Capture:
    frames = [_decode_frame(item) for item in row["frames"]]
    stacks = [tuple(frames[int(str(number))] for number in item) for item in row["stacks"]]
    world = row.get("world_size")
    return Capture(
        processes=tuple(_decode_process(item, stacks) for item in row["processes"]),  # type: ignore[arg-type]
        marks=tuple(_decode_marks(item) for item in row["marks"]),  # type: ignore[arg-type]
        ras=tuple(RasReply(str(a), float(str(t)), str(text)) for a, t, text in row.get("ras", [])),
        world_size=world if isinstance(world, int) else None,
        notes=tuple(str(note) for note in row.get("notes", [])),
        path=path,
    )


def _decode_frame(item: list[object]) -> StackFrame:
    name, file, line, native, source = item
    return StackFrame(str(name), str(file), int(str(line)), bool(native), str(source))


def _decode_process(item: dict[str, list[object]], stacks: list[tuple[StackFrame, ...]]) -> ProcessCapture:
    return ProcessCapture(
        rank=_int(item["rank"]) or 0,
        child=_int(item.get("child")),
        pid=_int(item.get("pid")),
        host=str(item.get("host") or ""),
        title=str(item.get("title") or ""),
        snapshots=tuple(_decode_snapshot(one, stacks) for one in item["snapshots"]),  # type: ignore[arg-type]
        native=tuple(_decode_stack(one, stacks) for one in item.get("native", [])),  # type: ignore[arg-type]
        kernels=tuple(str(one) for one in item.get("kernels", [])),
        notes=tuple(str(one) for one in item.get("notes", [])),
        parallel=tuple((str(k), int(v)) for k, v in item.get("parallel", [])),  # type: ignore[misc, has-type]
    )


def _decode_snapshot(one: dict[str, list[list[object]]], stacks: list[tuple[StackFrame, ...]]) -> Snapshot:
    at = one.get("at_s")
    return Snapshot(
        number=_int(one["number"]) or 0,
        at_s=float(at) if isinstance(at, int | float) else None,
        stacks=tuple(_decode_stack(item, stacks) for item in one.get("threads", [])),
        facts=tuple(_decode_facts(item) for item in one.get("facts", [])),
    )


def _decode_stack(item: list[object], stacks: list[tuple[StackFrame, ...]]) -> ThreadStack:
    tid, name, active, gil, number = item
    return ThreadStack(_int(tid), str(name), stacks[int(str(number))], _flag(active), _flag(gil))


def _decode_facts(item: list[object]) -> ThreadFacts:
    tid, comm, state, wchan, syscall, args, ticks, kernel, *more = item
    return ThreadFacts(
        int(str(tid)),
        str(comm),
        str(state),
        str(wchan),
        str(syscall),
        tuple(int(one) for one in args) if isinstance(args, list) else (),
        int(str(ticks)),
        tuple(str(one) for one in kernel) if isinstance(kernel, list) else (),
        _int(more[0]) if more else None,
    )


def _decode_marks(item: dict[str, list[list[object]]]) -> RankMarks:
    seen = item.get("seen_s")
    return RankMarks(
        rank=_int(item["rank"]) or 0,
        marks=tuple(
            Mark(float(str(at)), int(str(step)), str(phase), int(str(calls)))
            for at, step, phase, calls in item["marks"]
        ),
        seen_s=float(seen) if isinstance(seen, int | float) else None,
        expect_until_s=float(str(item.get("expect_until_s") or 0.0)),
        closed=str(item.get("closed") or ""),
    )


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
