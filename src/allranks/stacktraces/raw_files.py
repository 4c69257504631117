"""Reads raw captures, made by hand or by another tool, into a `Capture`.

Names: `rank{R}[.child{N}].pyspy[.s{K}].json`, `….pyspy*.txt`, `….proc[.s{K}].json`, `rank{R}.progress.jsonl`;
pystack, faulthandler, gdb and cuda-gdb texts are used where they help. Files with other names are known by what they hold. A
damaged file is a note, not an error.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    ThreadStack,
)
from allranks.stacktraces import debuggers
from allranks.stacktraces.boxes import read_box
from allranks.stacktraces.find import coordinates, number_ranks
from allranks.stacktraces.procfs import ProcessFacts, parse_facts, renumber

MAX_FILE_BYTES = 256 << 20
_NAME = re.compile(r"^rank(\d{1,7})(?:\.child(\d{1,6}))?\.([a-z].*)$")
#: One file per process, as `allranks stacks` and serving stacks write them: the rank is not in the name.
_BY_PID = re.compile(r"^(pyspy|gdb|cudagdb)_(.+)_(\d{1,10})\.txt$")
_KIND = re.compile(r"(pyspy|proc|pystack|faulthandler|gdb|cuda[_-]?gdb).*\.(json|txt)")
_SNAPSHOT = re.compile(r"\.s(\d{1,4})\.json$")
_SERVER_RANK = re.compile(r"^=== Rank (\d{1,7}): [^\n]* ===\r?\n", re.MULTILINE)
_CHILD = re.compile(r"child[_.-]?(\d{1,6})")
#: By tool and format, the best first: only the stacks of the best one are snapshots.
_PARSERS: dict[str, Callable[[str], tuple[ThreadStack, ...]]] = {
    "pyspy.json": debuggers.parse_json,
    "pyspy.txt": debuggers.parse_text,
    "pystack.txt": debuggers.parse_pystack,
    "faulthandler.txt": debuggers.parse_faulthandler,
    "gdb.txt": debuggers.parse_gdb,
    "cudagdb.txt": debuggers.parse_gdb,
}
_BEST = list(_PARSERS)
_DAMAGE = (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError)


@dataclass
class _Look:
    """What one file says of one process."""

    name: str
    kind: str
    stacks: tuple[ThreadStack, ...] = ()
    facts: ProcessFacts | None = None
    kernels: tuple[str, ...] = ()
    pid: int | None = None
    title: str = ""
    native: bool = False
    number: int = 0  # of the snapshot; 0: the first one of which something else is known
    rank: int | None = None  # where the file tells it

    @property
    def is_child(self) -> bool:
        """Whether it is a worker of a DataLoader."""
        names = (frame.name for stack in self.stacks for frame in stack.frames)
        return bool(_CHILD.search(self.name)) or "_worker_loop" in names


@dataclass
class _Process:
    """The files of one process."""

    rank: int
    child: int | None
    looks: list[_Look] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def kind_of_name(name: str) -> str:
    """What a file of a process holds, by the end of its name: a tool and a format; "" where it does not say that."""
    match = _KIND.fullmatch(name)
    kind = f"{re.sub(r'[_-]', '', match[1])}.{match[2]}" if match else ""
    return kind if kind in _PARSERS or kind == "proc.json" else ""


def is_known_name(name: str) -> bool:
    """Whether a file says by its name what it holds and of which rank, or which process."""
    found = _NAME.match(name)
    return bool(_BY_PID.match(name) or (found and (kind_of_name(found[3]) or found[3] == "progress.jsonl")))


def read_raw(folder: Path) -> Capture:
    """Every capture file directly in the folder. Unknown names are passed over."""
    processes: dict[tuple[int, int], _Process] = {}
    marks: dict[int, RankMarks] = {}
    notes: list[str] = []
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    for path, named in ((path, _NAME.match(path.name)) for path in files):
        if named and named[3] == "progress.jsonl":
            marks[int(named[1])] = _read_marks(path, int(named[1]), notes)
        elif named and kind_of_name(named[3]):
            child = None if named[2] is None else int(named[2])
            _add_file(processes, int(named[1]), child, path, named[3])
    by_pid = [(path, match) for path in files if (match := _BY_PID.match(path.name))]
    ranks = _ranks_of_pids(folder, [(m[2], int(m[3])) for _, m in by_pid], processes.values(), notes)
    for path, match in by_pid:
        _add_file(processes, ranks[match[2], int(match[3])], None, path, f"{match[1]}.txt", int(match[3]))
    captures = _finish(processes)
    seen = {
        one.rank: max(times)
        for one in captures
        if (times := [shot.at_s for shot in one.snapshots if shot.at_s is not None])
    }
    marked = tuple(replace(marks[rank], seen_s=seen.get(rank)) for rank in sorted(marks))
    return Capture(captures, marked, notes=tuple(notes), path=str(folder))


def _add_file(
    processes: dict[tuple[int, int], _Process],
    rank: int,
    child: int | None,
    path: Path,
    kind: str,
    pid: int | None = None,
) -> None:
    """Puts one file where it belongs; one that cannot be read leaves a note."""
    process = processes.setdefault((rank, -1 if child is None else child), _Process(rank, child))
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace")
        look = _read_look(path.name, kind_of_name(kind), text)
    except _DAMAGE as error:
        process.notes.append(f"{path.name}: damaged ({str(error)[:120]})")
        return
    snapshot = _SNAPSHOT.search(kind)
    look.number = int(snapshot[1]) if snapshot else 1 if kind.endswith(".json") else 0
    look.native = "native" in kind or look.kind.endswith("gdb.txt")
    look.pid = look.pid or pid
    process.looks.append(look)


def _read_look(name: str, kind: str, text: str) -> _Look:
    """What a tool says of one process; raises ValueError and its like where the text is not of this kind."""
    if kind == "proc.json":
        facts = parse_facts(text)
        return _Look(name, kind, facts=facts, pid=facts.pid, title=facts.title)
    look = _Look(name, kind, _PARSERS[kind](text))
    if kind == "pyspy.json":
        pids = (row.get("pid") for row in json.loads(text) if isinstance(row, dict))
        look.pid = next((pid for pid in pids if isinstance(pid, int)), None)
    elif kind == "pyspy.txt":
        look.pid, look.title = debuggers.process_title(text)
    elif kind == "cudagdb.txt":
        look.kernels = debuggers.parse_kernels(text)
    return look


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
        process = processes.setdefault((rank, -1 if child is None else child), _Process(rank, child))
        pid = next((one.pid for one in process.looks if one.pid), None)
        if pid and look.pid not in (None, pid):
            process.notes.append(f"{look.name}: rank {rank} is process {pid} in another file; not used")
        else:  # another look at the same process is another snapshot
            look.number = 1 + sum(not one.native for one in process.looks)
            process.looks.append(look)
    return Capture(_finish(processes), notes=tuple(notes))


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


def _looks(name: str, path: Path, notes: list[str]) -> Iterator[_Look]:
    """The processes in one file, each with its stacks; nothing when it is not a capture."""
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace")
        parts = _SERVER_RANK.split(text)  # what the debug server of torch writes: all ranks in one file
        for rank, part in zip(parts[1::2], parts[2::2], strict=True):
            yield from (replace(look, rank=int(rank)) for look in _looks_in(name, part))
        yield from _looks_in(name, text) if len(parts) == 1 else ()
    except _DAMAGE as error:
        notes.append(f"{name}: damaged ({str(error)[:120]})")


def _looks_in(name: str, text: str) -> Iterator[_Look]:
    """The processes in a text that one tool wrote."""
    kind = kind_of_capture(text[:4096].encode())
    several = kind == "pyspy.txt"
    for part in re.split(r"^(?=Process \d+: )", text, flags=re.MULTILINE) if several else [text]:
        look = _read_look(name, kind, part) if kind else None
        if look is not None and (look.stacks or not several):
            frames = (frame for stack in look.stacks for frame in stack.frames)
            look.native = kind == "gdb.txt" or any(frame.native for frame in frames)
            yield look


def _ranks_of_pids(
    folder: Path, named: list[tuple[str, int]], processes: Iterable[_Process], notes: list[str]
) -> dict[tuple[str, int], int]:
    """(host, pid) of files named by process → rank: by the black boxes near them, by capture files of the same process, else
    in the order of host and pid."""
    if not named:
        return {}
    near = (*folder.glob("*.box"), *folder.parent.glob("*.box"), *folder.parent.glob("*/*.box"))
    known = {box.pid: box.rank for path in near if (box := read_box(path)) is not None}
    known |= {look.pid: p.rank for p in processes if p.child is None for look in p.looks if look.pid}
    found = {key: known[key[1]] for key in named if key[1] in known}
    rest = [key for key in dict.fromkeys(sorted(named)) if key not in found]
    if rest:
        free = (number for number in range(len(named) + len(found) + 1) if number not in found.values())
        notes.append(f"the rank of {len(rest)} processes is not known: they are numbered by host and pid")
        found |= dict(zip(rest, free, strict=False))
    return found


def _finish(processes: Mapping[tuple[int, int], _Process]) -> tuple[ProcessCapture, ...]:
    return tuple(_freeze(processes[key]) for key in sorted(processes))


def _freeze(process: _Process) -> ProcessCapture:
    """The frozen capture: snapshots in order, text standing in where JSON is missing."""
    looks = sorted((one for one in process.looks if one.kind in _BEST), key=lambda o: _BEST.index(o.kind))
    facts = {one.number: one.facts for one in process.looks if one.facts is not None}
    first = min(facts, default=1)
    native = next((one.stacks for one in looks if one.native and one.stacks), ())
    seen = [one for one in looks if one.stacks and not one.native]
    stacks = {one.number or first: one.stacks for one in reversed(seen) if one.kind == seen[0].kind}
    if not stacks and (python := _python_only(native)):
        stacks = {first: python}
    sources = {
        (Path(frame.file).name, frame.line): frame.source
        for one in looks
        if one.kind == "pystack.txt"
        for stack in one.stacks
        for frame in stack.frames
        if frame.source
    }
    inner = {tid: outer for one in facts.values() for tid, outer in one.inner.items()}

    def seen_from_here(found: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
        return renumber(_with_sources(found, sources), inner)

    snapshots = tuple(
        Snapshot(
            number,
            facts[number].at_s if number in facts else None,
            seen_from_here(stacks.get(number, ())),
            facts[number].threads if number in facts else (),
        )
        for number in sorted({*stacks, *facts})
    )
    title = next((one.title for one in process.looks if one.title), "")
    return ProcessCapture(
        rank=process.rank,
        child=process.child,
        pid=next((one.pid for one in process.looks if one.pid), None),
        title=title,
        parallel=coordinates(title) if process.child is None else (),
        snapshots=snapshots,
        native=seen_from_here(native),
        kernels=next((one.kernels for one in looks if one.kernels), ()),
        notes=tuple(process.notes),
    )


def _python_only(stacks: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """The stacks without their native frames; threads without Python frames are left out."""
    kept = (replace(one, frames=tuple(f for f in one.frames if not f.native)) for one in stacks)
    return tuple(one for one in kept if one.frames)


def _with_sources(
    stacks: tuple[ThreadStack, ...], sources: dict[tuple[str, int], str]
) -> tuple[ThreadStack, ...]:
    """The stacks with the text of lines that another tool has printed: (file name, line) -> text."""

    def known(frame: StackFrame) -> StackFrame:
        text = "" if frame.native or frame.source else sources.get((Path(frame.file).name, frame.line), "")
        return replace(frame, source=text) if text else frame

    if not sources:
        return stacks
    return tuple(replace(stack, frames=tuple(known(frame) for frame in stack.frames)) for stack in stacks)


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
