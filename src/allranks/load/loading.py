"""Paths → LoadResult: finds the files, reads each, settles ranks and attempts, shares the tables."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from allranks.errors import InputError
from allranks.load.choose import TraceFile, attempt_of_name, choose, rank_by_prefix, ranks_of_names
from allranks.load.reading import Share, processes_for, read_here, take_within
from allranks.load.sources import DumpSource, LoadOptions, LoadResult, Raw, find_sources
from allranks.model.diagnosis import FileNote
from allranks.model.trace import CALL

#: A dump's modification time is when it was taken only if it lies so close behind the last timeout; else it was copied.
MAX_DUMP_DELAY_NS = 300 * 10**9


def load_paths(paths: Sequence[str], options: LoadOptions | None = None) -> LoadResult:
    """Reads everything behind the paths. Raises InputError when a path does not exist or nothing was readable."""
    options = options or LoadOptions()
    sources = _find([str(path) for path in paths], options)
    with _no_collector():
        each = _newest_of_each(options.newest_calls, sources)
        result = _settle(_read(replace(options, newest_calls=each), sources), paths)
        if each and options.newest_calls // max(1, len(result.traces)) != each:
            # Not every file was one of the job.
            result = _settle(_read(replace(options, newest_calls=0), sources), paths)
        return result


def _newest_of_each(calls: int, sources: list[DumpSource]) -> int:
    """How many calls of each black box to read; 0: all."""
    room = sum(source.size for source in sources) // CALL.itemsize
    return calls // len(sources) if 0 < calls < room else 0


def _find(paths: list[str], options: LoadOptions) -> list[DumpSource]:
    """The files behind the paths; a folder that gives no answer becomes a file that cannot be read."""
    if any("://" in path for path in paths):  # these keep limits of their own
        return list(find_sources(paths, options))
    found, all_of_them = take_within(find_sources(paths, options), options.read_limit_s)
    if not all_of_them:
        problem = f"no answer within {options.read_limit_s:g} s after {len(found)} files were found"
        found.append(DumpSource(", ".join(paths), "", problem=problem))
    return found


def _read(options: LoadOptions, sources: list[DumpSource]) -> Share:
    """Reads all sources, with as many processes as pay."""
    total, show = len(sources), options.progress or (lambda done, total: None)
    count = processes_for(sources)
    if count > 1:
        from allranks.load.parallel import read_shares  # small jobs start without it

        load = read_shares(options, sources, count)
    else:
        load = read_here(options, sources, lambda done: show(done, total))
    show(total, total)
    return load


@contextmanager
def _no_collector() -> Iterator[None]:
    """Switches the garbage collector off: it would walk all that was read so far, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _settle(load: Share, paths: Sequence[str]) -> LoadResult:
    """Ranks, attempts and duplicates, then the final traces and notes."""
    files, notes = _ranked(load)
    choice = choose(files, load.options.attempt)
    for file in choice.chosen:
        file.raw.header = replace(file.raw.header, rank=file.rank, attempt=file.attempt or 0)
    tables = load.reader.tables.freeze()
    traces = [file.raw.as_trace(*tables, file.path) for file in choice.chosen]
    notes += [_note(file) for file in choice.chosen]
    notes += [FileNote(c.path, c.rank, c.raw.kind, "skipped", reason) for c, reason in choice.dropped]
    notes += _failures(load)
    other = [source.location for source, error in load.failed if error.kind == "stacks"]
    order = {source.path: index for index, (source, _) in enumerate(load.raws)}
    notes.sort(key=lambda note: (note.rank is None, note.rank or 0, order.get(note.path, 0), note.path))
    if not traces and not other and not load.options.allow_nothing:
        raise _nothing(paths, notes)
    return LoadResult(traces, notes, other, choice.attempts, choice.attempt)


def _ranked(load: Share) -> tuple[list[TraceFile], list[FileNote]]:
    """(the files whose rank is known and wanted, notes on the others)."""
    names = _file_ranks([source.path for source, _ in load.raws], load.options)
    files: list[TraceFile] = []
    notes: list[FileNote] = []
    for source, raw in load.raws:
        rank = raw.header.rank if raw.header.rank is not None else names.get(source.path, raw.rank_hint)
        if rank is None and load.options.number_unknown:
            rank = _free_number([file.rank for file in files], names)
        problem = ""
        if rank is None:
            problem = "its rank is not in the file or its name"
        elif load.options.ranks is not None and rank not in load.options.ranks:
            problem = "not among the selected ranks"
        if problem or rank is None:
            notes.append(FileNote(source.path, rank, raw.kind, "skipped", problem))
            continue
        is_box = raw.kind.startswith("black box")
        attempt = raw.header.attempt if is_box else attempt_of_name(source.path)
        files.append(TraceFile(source.path, rank, attempt, _dated(source, raw)))
    return files, notes


def _file_ranks(paths: list[str], options: LoadOptions) -> dict[str, int]:
    if options.prefix is None:
        return ranks_of_names(paths)
    found = {path: rank_by_prefix(path.rpartition("/")[2], options.prefix) for path in paths}
    return {path: rank for path, rank in found.items() if rank is not None}


def _free_number(taken: list[int], names: dict[str, int]) -> int:
    """The lowest number that no other file has."""
    used = {*taken, *names.values()}
    return next(number for number in range(len(used) + 1) if number not in used)


def _dated(source: DumpSource, raw: Raw) -> Raw:
    """Takes the file's modification time as the time of the dump, where that is plausible."""
    if raw.header.written_ns or not len(raw.calls):
        return raw
    last = raw.last_event_ns()
    limit = int(raw.calls["timeout_ms"].max()) * 10**6 + MAX_DUMP_DELAY_NS
    if last <= source.mtime_ns <= last + limit:
        raw.header = replace(raw.header, written_ns=source.mtime_ns)
    return raw


def _note(candidate: TraceFile) -> FileNote:
    raw = candidate.raw
    note = "; ".join(raw.notes)
    return FileNote(candidate.path, candidate.rank, raw.kind, "damaged" if raw.damaged else "ok", note)


def _failures(load: Share) -> list[FileNote]:
    """Notes of files that gave nothing; a damaged one still tells its rank by its name."""
    damaged = [source.path for source, error in load.failed if not error.skip]
    ranks = _file_ranks(damaged, load.options)
    notes = []
    for source, error in load.failed:
        status: Literal["skipped", "damaged"] = "skipped" if error.skip else "damaged"
        notes.append(FileNote(source.path, ranks.get(source.path), error.kind, status, str(error)))
    return notes


def _nothing(paths: Sequence[str], notes: list[FileNote]) -> InputError:
    shown = ", ".join(map(str, paths))
    if not notes:
        return InputError(f"{shown}: no files", hint="Give the folder that holds the dumps or black boxes.")
    details = "\n".join(f"  {note.path}: {note.kind}: {note.note}" for note in notes[:10])
    more = f"\n  … and {len(notes) - 10} more" if len(notes) > 10 else ""
    return InputError(f"{shown}: none of {len(notes)} files is a readable dump", hint=details + more)
