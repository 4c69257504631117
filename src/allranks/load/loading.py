"""Loads traces: finds the files, reads each by its content, determines ranks and attempts, shares the tables.

torch writes the rank only into the file name, after a prefix of the user's choice; users add hosts, suffixes, dates and
attempts. `choice.py` decides which of several files of a rank is used.

A read from a dead NFS server cannot be interrupted. It runs in a thread, which is abandoned after a limit.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

from allranks.blackbox.header import MAGIC
from allranks.blackbox.reader import BytesFile, File, OpenFile, read_box
from allranks.blackbox.tables import Tables
from allranks.errors import InputError
from allranks.load.choice import TraceFile, choose, number_worlds
from allranks.load.sources import (
    GZIP,
    ZSTD,
    DumpSource,
    LoadOptions,
    LoadResult,
    Unreadable,
    find_sources,
    has_archive_name,
    open_archive,
    read_all,
    unwrap,
)
from allranks.model.diagnosis import FileNote
from allranks.model.formatting import ranks_text
from allranks.model.parsing import attempt_of_name, kind_of_capture, rank_by_prefix, ranks_of_names
from allranks.model.trace import CALL, RankTrace

if TYPE_CHECKING:
    from allranks.load.torch_dump import DumpReader

T = TypeVar("T")
TICK_S = 0.1  # between two updates of the progress
MAX_FOREIGN = 10_000  # members of an archive that are read if none of them is a dump
MAX_STALLS = 3  # files that may stall before the rest is skipped
#: Maximum time between the last timeout and the dump: a later modification time means that the file was copied.
MAX_DUMP_DELAY_NS = 300 * 10**9
HEAD_BYTES = 512


def load_paths(paths: Sequence[str], options: LoadOptions | None = None) -> LoadResult:
    """Loads all files below the paths. InputError if a path does not exist, no file is readable, or a selected rank has
    no dump."""
    options = options or LoadOptions()
    sources = _find([str(path) for path in paths], options)
    with _no_gc():
        room = sum(source.size for source in sources) // CALL.itemsize
        # calls to read of each black box; 0: all
        each = options.newest_calls // len(sources) if 0 < options.newest_calls < room else 0
        result = _settle(_read_all(replace(options, newest_calls=each), sources), paths)
        if each and options.newest_calls // max(1, len(result.traces)) != each:
            # some files were not used
            result = _settle(_read_all(replace(options, newest_calls=0), sources), paths)
        return result


def _find(paths: list[str], options: LoadOptions) -> list[DumpSource]:
    """The files below the paths; a folder that stalls becomes a file that cannot be read."""
    if any("://" in path for path in paths):  # requests have their own limits
        return list(find_sources(paths, options))
    found, all_of_them = take_within(find_sources(paths, options), options.read_limit_s)
    if not all_of_them:
        problem = f"no response within {options.read_limit_s:g} s, after {len(found)} files were found"
        found.append(DumpSource(", ".join(paths), "", problem=problem, unopened=True))
    return found


@contextmanager
def _no_gc() -> Iterator[None]:
    """Disables the garbage collector, which would traverse all loaded data repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _settle(load: Reader, paths: Sequence[str]) -> LoadResult:
    """Determines ranks and attempts, drops duplicates, and builds the final traces and notes."""
    files, notes = _ranked(load)
    choices = choose(files, load.options.attempt)
    worlds = [[_with_rank(file) for file in choice.chosen] for choice in choices]
    worlds[0] = _join_worlds(worlds[0], load.tables)
    chosen = number_worlds(worlds, load.tables.group)
    tables = load.tables.freeze()
    traces = [file.trace.with_tables(*tables, file.path) for file in chosen]
    for one in chosen:
        status: Literal["ok", "damaged"] = "damaged" if one.trace.damaged else "ok"
        notes.append(FileNote(one.path, one.rank, one.trace.kind, status, "; ".join(one.trace.notes)))
    notes += [
        FileNote(c.path, c.rank, c.trace.kind, "skipped", reason) for x in choices for c, reason in x.dropped
    ]
    notes += _failures(load)
    order = {source.path: index for index, (source, _) in enumerate(load.traces)}
    notes.sort(key=lambda note: (note.rank is None, note.rank or 0, order.get(note.path, 0), note.path))
    absent = (load.options.ranks or frozenset()) - {trace.header.rank for trace in traces}
    if absent and not load.options.allow_nothing:
        there = [note.rank for note in notes if note.rank is not None]
        raise InputError(f"no dump of {ranks_text(absent)}", hint=f"Found dumps of {ranks_text(there)}.")
    stacks = any(error.kind == "stacks" for _, error in load.failed)
    if not traces and not stacks and not load.options.allow_nothing:
        shown = ", ".join(map(str, paths))
        if not notes:
            raise InputError(
                f"{shown}: no files", hint="Give the folder that holds the dumps or black boxes."
            )
        details = [f"  {note.path}: {note.kind}: {note.note}" for note in notes[:10]]
        details += [f"  … and {len(notes) - 10} more"] if len(notes) > 10 else []
        raise InputError(f"{shown}: none of {len(notes)} files is a readable dump", hint="\n".join(details))
    return LoadResult(traces, notes)


def _with_rank(file: TraceFile) -> TraceFile:
    header = replace(file.trace.header, rank=file.rank, attempt=file.attempt or 0)
    return replace(file, trace=replace(file.trace, header=header))


def _join_worlds(files: list[TraceFile], tables: Tables) -> list[TraceFile]:
    """The files with all members in the default group: gloo's recorder writes the members of its newest group there."""
    counted = [
        (file, group)
        for file in files
        for group in file.trace.groups
        if group.backend == "gloo"
        and group.desc == "default_pg"
        and group.ranks == (*range(len(group.ranks)),)
    ]
    size = max((len(group.ranks) for _, group in counted), default=0)
    joined = {file.path: file for file in files}
    for file, group in counted:
        if len(group.ranks) < size and file.trace.kind.startswith("torch"):
            whole = tables.group(replace(group, ranks=tuple(range(size))))
            groups = tuple(whole if one is group else one for one in file.trace.groups)
            header = replace(file.trace.header, world_size=size)
            joined[file.path] = replace(file, trace=replace(file.trace, groups=groups, header=header))
    return list(joined.values())


def _ranked(load: Reader) -> tuple[list[TraceFile], list[FileNote]]:
    """(files with a known and selected rank, notes on the others)."""
    names = _file_ranks([source.path for source, _ in load.traces], load.options)
    files: list[TraceFile] = []
    notes: list[FileNote] = []
    for source, raw in load.traces:
        rank = raw.header.rank if raw.header.rank is not None else names.get(source.path, raw.rank_hint)
        if rank is None and load.options.number_unknown:
            used = {*(file.rank for file in files), *names.values()}
            rank = next(number for number in range(len(used) + 1) if number not in used)
        made = raw.is_box and any(group.store for group in raw.groups)
        rank = -1 if rank is None and made else rank
        if rank is None or (load.options.ranks is not None and rank not in load.options.ranks):
            unknown = "neither the file nor its name contains a rank"
            problem = unknown if rank is None else "not among the selected ranks"
            notes.append(FileNote(source.path, rank, raw.kind, "skipped", problem))
            continue
        attempt = raw.header.attempt if raw.is_box else attempt_of_name(source.path)
        files.append(TraceFile(source.path, rank, attempt, _dated(source, raw)))
    return files, notes


def _file_ranks(paths: list[str], options: LoadOptions) -> dict[str, int]:
    if options.prefix is None:
        return ranks_of_names(paths)
    found = {path: rank_by_prefix(path.rpartition("/")[2], options.prefix) for path in paths}
    return {path: rank for path, rank in found.items() if rank is not None}


def _dated(source: DumpSource, trace: RankTrace) -> RankTrace:
    """Uses the file's modification time as the time of the dump, if plausible."""
    if trace.header.written_ns or not len(trace.calls):
        return trace
    last = trace.last_event_ns()
    limit = int(trace.calls["timeout_ms"].max()) * 10**6 + MAX_DUMP_DELAY_NS
    if last <= source.mtime_ns <= last + limit:
        return replace(trace, header=replace(trace.header, written_ns=source.mtime_ns, dated=True))
    return trace


def _failures(load: Reader) -> list[FileNote]:
    """Notes on unreadable files; the rank of a damaged dump is taken from its name."""
    dumps = [source.path for source, error in load.failed if error.status != "skipped"]
    beside = [source.path for source, _ in load.traces]  # ranks follow from differences between names
    ranks = _file_ranks([*dumps, *beside], load.options) if dumps else {}
    return [
        FileNote(
            source.path,
            ranks.get(source.path) if source.path in dumps else None,
            error.kind,
            error.status,
            str(error),
        )
        for source, error in load.failed
    ]


@dataclass
class Reader:
    """Reads files one by one into traces without tables."""

    options: LoadOptions
    tables: Tables = field(default_factory=Tables)
    traces: list[tuple[DumpSource, RankTrace]] = field(default_factory=list)
    failed: list[tuple[DumpSource, Unreadable]] = field(default_factory=list)

    @cached_property
    def dumps(self) -> DumpReader:
        """The reader of dumps, imported with the first one."""
        from allranks.load.torch_dump import DumpReader

        return DumpReader(self.tables)

    def read(self, source: DumpSource) -> None:
        """Reads one source, or all members of an archive."""
        before = len(self.traces)
        try:
            for number, member in enumerate(self._members(source)):
                if number >= MAX_FOREIGN and len(self.traces) == before:
                    note = f"none of its first {MAX_FOREIGN:,} members is a dump: the others were not read"
                    raise Unreadable(note, kind="tar archive")
                try:
                    self.traces.append((member, self._read(member)))
                except Unreadable as error:
                    self.failed.append((member, error))
        except Unreadable as error:
            self.failed.append((source, error))

    def _members(self, source: DumpSource) -> Iterable[DumpSource]:
        """The members of an archive; else the source itself."""
        if source.problem or not has_archive_name(source.path):
            return [source]
        try:
            members, problem = open_archive(source, self.options)
        except OSError as error:
            raise Unreadable(str(error.strerror or error), unopened=True) from error
        if problem and members is not None:
            self.failed.append((source, Unreadable(problem, kind="tar archive")))
        return [source] if members is None else members

    def _read(self, source: DumpSource) -> RankTrace:
        """Reads one file. Raises Unreadable, whose message becomes the note."""
        if source.problem:
            foreign = source.problem == "not a regular file"
            raise Unreadable(source.problem, skip=foreign, unopened=source.unopened)
        try:
            if source.data is not None and source.data.startswith(MAGIC):
                return self._read_box(BytesFile(source.data))
            if source.data is not None:
                return self.read_bytes(source.path, read_all(source, self.options.max_file_bytes))
            fd = os.open(source.location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                head = os.pread(fd, HEAD_BYTES, 0)
                if head.startswith(MAGIC):
                    return self._read_box(OpenFile(fd))
            finally:
                os.close(fd)
            if not head.startswith((GZIP, ZSTD)):
                _require_dump(source.path, head)
            return self.read_bytes(source.path, read_all(source, self.options.max_file_bytes))
        except OSError as error:
            raise Unreadable(str(error.strerror or error), unopened=True) from error

    def _read_box(self, file: File) -> RankTrace:
        try:
            return read_box(file, self.tables, self.options.max_box_bytes, self.options.newest_calls)
        except InputError as error:
            raise Unreadable(str(error), kind="black box") from error

    def read_bytes(self, path: str, data: bytes) -> RankTrace:
        """Reads a file in memory, decompressing it first."""
        data, problem = unwrap(data, self.options.max_file_bytes)
        try:
            if data.startswith(MAGIC):
                trace = self._read_box(BytesFile(data))
            else:
                _require_dump(path, data[:HEAD_BYTES])
                trace = self.dumps.read_pickle(data) if data[:1] == b"\x80" else self.dumps.read_json(data)
        except Unreadable as error:
            if problem:
                raise Unreadable(problem, kind=error.kind) from error
            raise
        return replace(trace, damaged=True, notes=(problem, *trace.notes)) if problem else trace


def _require_dump(path: str, head: bytes) -> None:
    """Raises Unreadable unless a file begins as a pickle or as JSON. An empty log is skipped; an empty dump is damaged."""
    if not head:
        is_log = path.endswith((".log", ".out", ".err", ".txt"))
        raise Unreadable("empty file", kind="text" if is_log else "unknown", skip=is_log)
    if head[:1] == b"\x80" or head.lstrip()[:1] == b"{":
        return
    name = os.path.basename(path)
    if ".pyspy" in name or ".proc." in name or name.endswith(".progress.jsonl") or kind_of_capture(head):
        raise Unreadable("a stack capture: `allranks stacks` reads it", kind="stacks", skip=True)
    kinds = ((b"\x7fELF", "ELF core or program"), (b"PK\x03\x04", "zip archive"), (b"#!", "script"))
    for magic, kind in kinds:
        if head.startswith(magic):
            raise Unreadable("not a dump", kind=kind, skip=True)
    text = all(byte >= 32 or byte in b"\t\r\n\x1b" for byte in head[:256])
    raise Unreadable("not a dump", kind="text" if text else "unknown", skip=True)


def _read_all(options: LoadOptions, sources: list[DumpSource]) -> Reader:
    """Reads all sources. If one stalls, it gets a note, and the others are read again without it."""
    stalled: list[tuple[DumpSource, Unreadable]] = []
    total, show = len(sources), options.progress or (lambda done, total: None)
    for _ in range(MAX_STALLS + 1):
        load = Reader(options)
        read, all_of_them = take_within(
            map(load.read, sources), options.read_limit_s, lambda done: show(done, total)
        )
        if all_of_them:
            break
        left = sources[len(read)]
        note = f"no response within {options.read_limit_s:g} s"
        stalled.append((left, Unreadable(note, unopened=True)))
        if len(stalled) < MAX_STALLS:
            sources = [source for source in sources if source is not left]
            continue
        note = f"not tried, because {MAX_STALLS} other files did not respond"
        stalled += [(source, Unreadable(note, unopened=True)) for source in sources[len(read) + 1 :]]
        sources = sources[: len(read)]
    show(total, total)
    load.failed += stalled
    return load


def take_within(
    steps: Iterable[T], limit_s: float, show: Callable[[int], None] | None = None
) -> tuple[list[T], bool]:
    """(results, whether all steps finished). Gives up if one step takes longer than the limit.

    The abandoned thread may still use its data, so no other code may use that afterwards.
    """
    taken: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def take() -> None:
        try:
            for item in steps:
                taken.append(item)
        except BaseException as error:  # re-raised by the waiting thread
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=take, name="allranks-load", daemon=True).start()
    done, since, cpu = 0, time.monotonic(), time.process_time()
    while not ended.wait(TICK_S):
        count, now = len(taken), time.monotonic()
        if count > done or time.process_time() - cpu > TICK_S / 2:  # CPU time: a large file, not a stall
            done, since = count, now
            if show is not None:
                show(count)
        elif now - since > limit_s:
            return taken[:count], False
        cpu = time.process_time()
    if errors:
        raise errors[0]
    return taken, True
