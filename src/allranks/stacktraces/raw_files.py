"""Reads a folder of raw captures, made by hand or by another tool, into a `Capture`.

Names: `rank{R}[.child{N}].pyspy[.s{K}].json`, `….pyspy*.txt`, `….proc[.s{K}].json`, `rank{R}.progress.jsonl`;
pystack, faulthandler, gdb and cuda-gdb texts are used where they help. Files with other names are known by what they hold. A
damaged file is a note, not an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import read_regular
from allranks.model.parsing import kind_of_capture, ranks_of_names
from allranks.model.stacks import (
    Capture,
    Mark,
    ProcessCapture,
    RankMarks,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacktraces import debuggers
from allranks.stacktraces.find import coordinates, number_ranks
from allranks.stacktraces.procfs import parse_facts, renumber

MAX_FILE_BYTES = 256 << 20
_NAME = re.compile(r"^rank(\d{1,7})(?:\.child(\d{1,6}))?\.([a-z].*)$")
#: One file per process, as `allranks stacks` and serving stacks write them: the rank is not in the name.
_BY_PID = re.compile(r"^(pyspy|cudagdb)_(.+)_(\d{1,10})\.txt$")
_SERVER_RANK = re.compile(r"^=== Rank (\d{1,7}): [^\n]* ===\r?\n", re.MULTILINE)
_CHILD = re.compile(r"child[_.-]?(\d{1,6})")
_PARSERS = {
    "pystack.txt": debuggers.parse_pystack,
    "faulthandler.txt": debuggers.parse_faulthandler,
    "gdb.txt": debuggers.parse_gdb,
}
_SNAPSHOT = re.compile(r"\.s(\d{1,4})\.json$")
#: Files of tools that we understand; whatever else is named like them is not read.
_KNOWN = re.compile(r"(pyspy|proc).*\.json|(pyspy|pystack|faulthandler|gdb|cuda[_-]?gdb).*\.txt")


@dataclass
class _Process:
    """What the files of one process gave, while reading."""

    rank: int
    child: int | None
    pid: int | None = None
    title: str = ""
    stacks: dict[int, tuple[ThreadStack, ...]] = field(default_factory=dict)
    facts: dict[int, tuple[ThreadFacts, ...]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    texts: dict[str, tuple[ThreadStack, ...]] = field(default_factory=dict)
    native: tuple[ThreadStack, ...] = ()
    kernels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    inner: dict[int, int] = field(default_factory=dict)


def is_known_name(name: str) -> bool:
    """Whether a file says by its name what it holds and of which rank, or which process."""
    found = _NAME.match(name)
    return bool(
        _BY_PID.match(name) or (found and (_KNOWN.fullmatch(found[3]) or found[3] == "progress.jsonl"))
    )


def read_raw(folder: Path) -> Capture:
    """Every capture file directly in the folder. Unknown names are passed over."""
    processes: dict[tuple[int, int], _Process] = {}
    marks: dict[int, RankMarks] = {}
    notes: list[str] = []
    ranks = _ranks_of_pids(folder, notes)
    for path in (one for one in sorted(folder.iterdir()) if one.is_file()):
        if by_pid := _BY_PID.match(path.name):
            rank = ranks[by_pid[2], int(by_pid[3])]
            if (rank, -1) not in processes or not any(processes[rank, -1].stacks.values()):
                process = processes.setdefault((rank, -1), _Process(rank, None, int(by_pid[3])))
                _read_into(process, path, f"{by_pid[1]}.txt")
        elif by_rank := _NAME.match(path.name):
            rank, child, kind = int(by_rank[1]), None if by_rank[2] is None else int(by_rank[2]), by_rank[3]
            if kind == "progress.jsonl":
                marks[rank] = _read_marks(path, rank, notes)
            else:
                process = processes.setdefault((rank, -1 if child is None else child), _Process(rank, child))
                _read_into(process, path, kind)
    seen = {one.rank: max(one.times.values()) for one in processes.values() if one.times}
    return Capture(
        processes=tuple(_finish(processes[key]) for key in sorted(processes)),
        marks=tuple(replace(marks[rank], seen_s=seen.get(rank)) for rank in sorted(marks)),
        notes=tuple(notes),
        path=str(folder),
    )


@dataclass
class _Look:
    """The stacks of one process, in a file whose name tells little."""

    name: str
    kind: str
    stacks: tuple[ThreadStack, ...]
    pid: int | None = None
    title: str = ""
    rank: int | None = None  # where the file tells it

    @property
    def is_child(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        names = (frame.name for stack in self.stacks for frame in stack.frames)
        return bool(_CHILD.search(self.name)) or "_worker_loop" in names


def read_by_content(files: Iterable[tuple[str, Path]]) -> Capture:
    """Captures in files of any name: the rank is in the name, perhaps in that of its folder; else they are counted."""
    notes: list[str] = []
    looks = [look for name, path in files for look in _looks(name, path, notes)]
    processes: dict[tuple[int, int], _Process] = {}
    for rank, look in zip(_ranks_of_looks(looks, notes), looks, strict=True):
        child = None
        if look.is_child:
            number = _CHILD.search(look.name)
            child = int(number[1]) if number else sum(r == rank and c >= 0 for r, c in processes)
        process = _Process(rank, child, look.pid, look.title)
        _add_look(processes.setdefault((rank, -1 if child is None else child), process), look)
    return Capture(tuple(_finish(processes[key]) for key in sorted(processes)), notes=tuple(notes))


def _ranks_of_looks(looks: list[_Look], notes: list[str]) -> list[int]:
    """By the names of files with one process; others are counted, and children go with the process before them."""
    mains = Counter(look.name for look in looks if not look.is_child)
    names = dict.fromkeys(look.name for look in looks if look.rank is None)
    named = ranks_of_names(name for name in names if mains[name] < 2)
    named |= _ranks_of_titles([look for look in looks if not look.is_child and look.rank is None], mains)
    free = (number for number in range(len(looks) + len(named)) if number not in named.values())
    ranks: list[int] = []
    for look in looks:
        if look.rank is not None:
            ranks.append(look.rank)
        elif look.name in named:
            ranks.append(named[look.name])
        else:
            ranks.append(ranks[-1] if look.is_child and ranks else next(free))
    counted = sum(look.rank is None and look.name not in named and not look.is_child for look in looks)
    if counted:
        notes.append(
            f"the rank of {counted} processes is not known: they are counted in the order of the files"
        )
    return ranks


def _ranks_of_titles(looks: list[_Look], mains: Mapping[str, int]) -> dict[str, int]:
    """File → rank by py-spy's first line ("Process 101: sglang::scheduler_TP0"), where all have such titles and no name says "rank"."""
    places = [coordinates(look.title) for look in looks]
    if not all(places) or any(mains[look.name] > 1 or "rank" in look.name.lower() for look in looks):
        return {}
    return {look.name: rank for look, rank in zip(looks, number_ranks(places), strict=True)}


def _add_look(process: _Process, look: _Look) -> None:
    """Another look at the same process is another snapshot; native frames are kept apart."""
    if process.pid is not None and look.pid not in (None, process.pid):
        process.notes.append(
            f"{look.name}: rank {process.rank} is process {process.pid} in another file; not used"
        )
    elif look.kind == "gdb.txt" or any(frame.native for stack in look.stacks for frame in stack.frames):
        process.texts["gdb" if look.kind == "gdb.txt" else "native"] = look.stacks
    else:
        process.stacks[len(process.stacks) + 1] = look.stacks


def _looks(name: str, path: Path, notes: list[str]) -> Iterator[_Look]:
    """The processes in one file, each with its stacks; nothing when it is not a capture."""
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace")
        parts = _SERVER_RANK.split(text)  # what the debug server of torch writes: all ranks in one file
        for rank, part in zip(parts[1::2], parts[2::2], strict=True):
            yield from (replace(look, rank=int(rank)) for look in _looks_in(name, part))
        yield from _looks_in(name, text) if len(parts) == 1 else ()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        notes.append(f"{name}: damaged ({str(error)[:120]})")


def _looks_in(name: str, text: str) -> Iterator[_Look]:
    """The processes in a text that one tool wrote."""
    kind = kind_of_capture(text[:4096].encode())
    if kind == "pyspy.json":
        pids = [row.get("pid") for row in json.loads(text) if isinstance(row, dict)]
        yield _Look(
            name, kind, debuggers.parse_json(text), next((p for p in pids if isinstance(p, int)), None)
        )
    elif kind == "pyspy.txt":
        for part in re.split(r"^(?=Process \d+: )", text, flags=re.MULTILINE):
            if stacks := debuggers.parse_text(part):
                pid = re.match(r"Process (\d{1,10}):", part)
                yield _Look(name, kind, stacks, int(pid[1]) if pid else None, debuggers.process_title(part))
    elif kind:
        yield _Look(name, kind, _PARSERS[kind](text))


def _ranks_of_pids(folder: Path, notes: list[str]) -> dict[tuple[str, int], int]:
    """(host, pid) of files named by process → rank: by the black boxes near them, by capture files of the same process, else
    in the order of host and pid."""
    named = sorted((m[2], int(m[3])) for path in folder.iterdir() if (m := _BY_PID.match(path.name)))
    if not named:
        return {}
    from allranks.stacktraces.boxes import read_box

    near = (*folder.glob("*.box"), *folder.parent.glob("*.box"), *folder.parent.glob("*/*.box"))
    known = {box.pid: box.rank for path in near if (box := read_box(path)) is not None}
    known |= dict(_pids_of_captures(folder))
    found = {key: known[key[1]] for key in named if key[1] in known}
    rest = [key for key in dict.fromkeys(named) if key not in found]
    if rest:
        free = (number for number in range(len(named) + len(found) + 1) if number not in found.values())
        notes.append(f"the rank of {len(rest)} processes is not known: they are numbered by host and pid")
        found |= dict(zip(rest, free, strict=False))
    return found


def _pids_of_captures(folder: Path) -> Iterator[tuple[int, int]]:
    """(pid, rank) of captures named by rank that tell their process."""
    for path in folder.glob("rank*.pyspy*.json"):
        match = _NAME.match(path.name)
        if match is None or match.group(2) is not None:
            continue
        try:
            threads = json.loads(read_regular(path, MAX_FILE_BYTES))
            yield int(threads[0]["pid"]), int(match.group(1))
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
            continue


def _read_into(process: _Process, path: Path, kind: str) -> None:
    """Puts one file where it belongs; a file that cannot be read leaves a note."""
    if not _KNOWN.fullmatch(kind):
        return
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            process.notes.append(f"{path.name}: larger than {MAX_FILE_BYTES >> 20} MiB, not read")
            return
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace")
        _take_json(process, text, kind) if kind.endswith(".json") else _take_text(process, text, kind)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        process.notes.append(f"{path.name}: damaged ({str(error)[:120]})")


def _take_json(process: _Process, text: str, kind: str) -> None:
    match = _SNAPSHOT.search(kind)
    number = int(match.group(1)) if match else 1
    if kind.startswith("proc"):
        facts = parse_facts(text)
        process.facts[number] = facts.threads
        process.pid = process.pid or facts.pid
        process.title = process.title or facts.title
        process.inner.update(facts.inner)
        if facts.at_s is not None:
            process.times[number] = facts.at_s
    elif "native" in kind:
        process.native = debuggers.parse_json(text)
    else:
        process.stacks[number] = debuggers.parse_json(text)


def _take_text(process: _Process, text: str, kind: str) -> None:
    if kind.startswith("pyspy"):
        process.title = process.title or debuggers.process_title(text)
        process.texts["native" if "native" in kind else kind] = debuggers.parse_text(text)
    elif kind.startswith("pystack"):
        process.texts["pystack_native" if "native" in kind else "pystack"] = debuggers.parse_pystack(text)
    elif kind.startswith("faulthandler"):
        process.texts["faulthandler"] = debuggers.parse_faulthandler(text)
    elif kind.startswith("gdb"):
        process.texts["gdb"] = debuggers.parse_gdb(text)
    else:
        process.kernels = debuggers.parse_kernels(text)
        process.texts.setdefault("gdb", debuggers.parse_gdb(text))


def _finish(process: _Process) -> ProcessCapture:
    """The frozen capture: snapshots in order, text standing in where JSON is missing."""
    texts = {name: stacks for name, stacks in process.texts.items() if stacks}
    if not any(process.stacks.values()):
        stand_in = _first(texts, ("pyspy.txt", "pyspy_nonblocking.txt", "pyspy_locals.txt"))
        stand_in = stand_in or next((v for k, v in texts.items() if k.startswith("pyspy")), ())
        stand_in = stand_in or _first(texts, ("pystack", "faulthandler"))
        stand_in = stand_in or _python_only(
            process.native or texts.get("native") or texts.get("pystack_native", ())
        )
        if stand_in:
            process.stacks[min(process.facts, default=1)] = stand_in
    native = process.native or texts.get("native", ()) or texts.get("pystack_native", ())
    sources = _sources([*texts.get("pystack", ()), *texts.get("pystack_native", ())])
    numbers = sorted(set(process.stacks) | set(process.facts))
    snapshots = tuple(
        Snapshot(
            number,
            process.times.get(number),
            renumber(_with_sources(process.stacks.get(number, ()), sources), process.inner),
            process.facts.get(number, ()),
        )
        for number in numbers
    )
    return ProcessCapture(
        rank=process.rank,
        child=process.child,
        pid=process.pid,
        title=process.title,
        parallel=coordinates(process.title) if process.child is None else (),
        snapshots=snapshots,
        native=renumber(_with_sources(native or texts.get("gdb", ()), sources), process.inner),
        kernels=process.kernels,
        notes=tuple(process.notes),
    )


def _first(texts: dict[str, tuple[ThreadStack, ...]], names: Iterable[str]) -> tuple[ThreadStack, ...]:
    return next((texts[name] for name in names if name in texts), ())


def _python_only(stacks: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """The stacks without their native frames; threads without Python frames are left out."""
    kept = (replace(one, frames=tuple(f for f in one.frames if not f.native)) for one in stacks)
    return tuple(one for one in kept if one.frames)


def _sources(stacks: Iterable[ThreadStack]) -> dict[tuple[str, int], str]:
    """(file name, line) -> text of that line, from tools that print it."""
    return {
        (Path(frame.file).name, frame.line): frame.source
        for stack in stacks
        for frame in stack.frames
        if frame.source
    }


def _with_sources(
    stacks: tuple[ThreadStack, ...], sources: dict[tuple[str, int], str]
) -> tuple[ThreadStack, ...]:
    if not sources:
        return stacks
    return tuple(
        replace(stack, frames=tuple(_with_source(frame, sources) for frame in stack.frames))
        for stack in stacks
    )


def _with_source(frame: StackFrame, sources: dict[tuple[str, int], str]) -> StackFrame:
    if frame.native or frame.source:
        return frame
    text = sources.get((Path(frame.file).name, frame.line), "")
    return replace(frame, source=text) if text else frame


def _read_marks(path: Path, rank: int, notes: list[str]) -> RankMarks:
    """Progress marks, one JSON object a line; lines that are not are counted and passed over."""
    try:
        lines = read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        notes.append(f"{path.name}: {error}")
        return RankMarks(rank)
    marks = [_mark(line) for line in lines if line.strip()]
    known = [mark for mark in marks if mark is not None]
    if len(known) < len(marks):
        notes.append(f"{path.name}: {len(marks) - len(known)} lines are not progress marks")
    return RankMarks(rank, tuple(sorted(known, key=lambda mark: mark.at_s)))


def _mark(line: str) -> Mark | None:
    try:
        row = json.loads(line)
        calls = -1 if row.get("calls") is None else int(row["calls"])
        return Mark(float(row["t"]), int(row["step"]), str(row.get("phase") or ""), calls)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
