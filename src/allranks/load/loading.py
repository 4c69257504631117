"""Paths → LoadResult: finds the files, reads each, settles ranks and attempts, shares the tables.

Whose file is it, and which of several files of a rank counts? torch writes the rank into the file name and nowhere else,
behind whatever prefix the user chose; people add hosts, suffixes, dates and attempts. A number that is a process id, a date
or a host's is not a rank.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from allranks.blackbox.tables import Tables
from allranks.errors import InputError
from allranks.load.reading import Share, read_here, take_within
from allranks.load.sources import DumpSource, LoadOptions, LoadResult, Raw, find_sources
from allranks.load.worlds import TraceFile, number_worlds, split_worlds
from allranks.model.diagnosis import FileNote
from allranks.model.parsing import attempt_of_name, rank_by_prefix, ranks_of_names
from allranks.model.trace import CALL

OVERLAP_NS = 1_000_000_000  # clocks of nodes may differ by less than this


@dataclass(frozen=True)
class FileChoice:
    """One file per rank, and for every other file the reason why not."""

    chosen: tuple[TraceFile, ...]
    dropped: tuple[tuple[TraceFile, str], ...]
    attempts: tuple[int, ...]
    attempt: int | None


def choose(candidates: list[TraceFile], wanted: int | None) -> list[FileChoice]:
    """The newest job, for each of its worlds the newest attempt (or the wanted one), and in that the best file of every rank."""
    candidates, of_others = _newest_job(candidates)
    candidates, of_another = _newer_kind(candidates)
    found = [_choose_attempt(world, wanted) for world in split_worlds(candidates)]
    return [replace(found[0], dropped=(*of_others, *of_another, *found[0].dropped)), *found[1:]]


def _newest_job(candidates: list[TraceFile]) -> tuple[list[TraceFile], list[tuple[TraceFile, str]]]:
    """Files of several jobs that have the same ranks are not mixed: (those of the newest one, the others and why not)."""
    jobs: dict[tuple[str, str], list[TraceFile]] = defaultdict(list)
    for candidate in candidates:
        kind, job = _job_of(candidate)
        if job:
            jobs[kind, job].append(candidate)
    other: dict[str, str] = {}
    for kind in ("job", "ranks"):
        found = {job: files for (each, job), files in jobs.items() if each == kind and len(files) > 1}
        newest = max(found, key=lambda job: max(c.raw.last_event_ns() for c in found[job]), default="")
        ranks = {c.rank for c in found.get(newest, ())}
        for job, files in found.items():
            if job != newest and any(c.rank in ranks for c in files):
                why = f"of {kind} {job}; that of {kind} {newest} is newer: give the files of one job"
                other |= {c.path: why for c in files}
    rest = [c for c in candidates if c.path not in other]
    return rest, [(c, other[c.path]) for c in candidates if c.path in other]


def _newer_kind(candidates: list[TraceFile]) -> tuple[list[TraceFile], list[tuple[TraceFile, str]]]:
    """Dumps with ranks that the job of the black boxes does not have are of another job: (the newer files, the others)."""
    boxes = [c for c in candidates if c.raw.kind.startswith("black box")]
    dumps = [c for c in candidates if not c.raw.kind.startswith("black box")]
    size, needed = _world_of(boxes), _world_of(dumps)
    known = any((c.raw.header.world_size or 0) > 1 for c in boxes)
    if not known or needed <= size:
        return candidates, []
    newest = {id(files): max(c.raw.last_event_ns() for c in files) for files in (boxes, dumps)}
    kept, left = (dumps, boxes) if newest[id(dumps)] > newest[id(boxes)] else (boxes, dumps)
    why = f"the black boxes are of a job of {size} ranks, the dumps of one of {needed} or more: give the files of one job"
    return kept, [(c, why) for c in left]


def _world_of(files: list[TraceFile]) -> int:
    """How many ranks there are at least, by the groups that the files know; 0 when they know none."""
    groups = [group.ranks for c in files for group in c.raw.groups if len(group.ranks) > 1]
    told = max((c.raw.header.world_size or 0 for c in files), default=0)
    return max(1 + max(map(max, groups)), told) if groups else 0


def _job_of(candidate: TraceFile) -> tuple[str, str]:
    """("job", its name) of a black box; of a dump, which knows no name, ("ranks", those of its largest group)."""
    raw = candidate.raw
    if raw.kind.startswith("black box"):
        return "job", raw.header.job
    ranks = max((group.ranks for group in raw.groups), key=len, default=())
    return "ranks", f"{ranks[0]}-{ranks[-1]}" if candidate.rank in ranks else ""


def _choose_attempt(candidates: list[TraceFile], wanted: int | None) -> FileChoice:
    numbered = number_attempts(candidates)
    attempts = tuple(sorted(set(numbered.values())))
    if wanted is not None and wanted not in attempts:
        raise InputError(f"no attempt {wanted} here; found {', '.join(map(str, attempts)) or 'none'}")
    if wanted is None and len(attempts) > 1 and attempts_overlap(candidates, numbered):
        return _newest_processes(candidates, attempts)
    picked = wanted if wanted is not None else _newest(candidates, numbered)
    dropped = []
    by_rank: dict[int, list[TraceFile]] = defaultdict(list)
    for candidate in candidates:
        number = numbered[candidate.path]
        if number == picked:
            by_rank[candidate.rank].append(candidate)
        elif wanted is not None:
            dropped.append((candidate, f"of attempt {number}, not {picked}"))
        else:
            dropped.append((candidate, f"of attempt {number}; attempt {picked} is newer"))
    chosen = []
    for rank in sorted(by_rank):
        files = by_rank[rank]
        best, *rest = sorted(files, key=_goodness, reverse=True) if len(files) > 1 else files
        chosen.append(best)
        dropped += [(other, f"rank {rank} is read from {best.path}") for other in rest]
    return FileChoice(tuple(chosen), tuple(dropped), attempts, picked)


def attempts_overlap(candidates: list[TraceFile], numbered: dict[str, int]) -> bool:
    """Whether replicas were restarted one by one: they have groups of replicas, or a rank lived on after another one's
    next attempt had begun.

    A restart of the whole job ends every rank before any begins again. Only black boxes tell when they began. A rank may
    live on without a trace of it: it hangs since before the other began again.
    """
    if not all(c.raw.kind.startswith("black box") and c.raw.header.start_ns for c in candidates):
        return False
    if any(group.name.startswith("replicas/") for c in candidates for group in c.raw.groups):
        return True
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    for candidate in candidates:
        number, begin = numbered[candidate.path], candidate.raw.header.start_ns
        begun[number] = min(begun.get(number, begin), begin)
        ended[number] = max(ended.get(number, 0), candidate.raw.last_event_ns())
    pairs = itertools.pairwise(sorted(begun))
    return any(ended[earlier] > begun[later] + OVERLAP_NS for earlier, later in pairs)


def _newest_processes(candidates: list[TraceFile], attempts: tuple[int, ...]) -> FileChoice:
    """Of every rank the file of its newest process, whatever its attempt."""
    by_start = sorted(candidates, key=lambda c: (c.raw.header.start_ns, c.path))
    newest = {candidate.rank: candidate for candidate in by_start}
    chosen = tuple(newest[rank] for rank in sorted(newest))
    dropped = [
        (c, f"of an earlier process of rank {c.rank}, which was restarted by itself")
        for c in candidates
        if newest[c.rank] is not c
    ]
    return FileChoice(chosen, tuple(dropped), attempts, attempts[-1])


def number_attempts(candidates: list[TraceFile]) -> dict[str, int]:
    """An attempt number for every file: what the file says, else one per set of folders with the same ranks.

    Files without a number belong to one attempt as long as no rank occurs in two folders. When ranks do repeat,
    every folder is an attempt of its own, numbered by time behind the numbers in use.
    """
    numbered = {c.path: c.attempt for c in candidates if c.attempt is not None}
    open_ones = [c for c in candidates if c.attempt is None]
    folders: dict[str, list[TraceFile]] = defaultdict(list)
    for candidate in open_ones:
        folders[candidate.path.rpartition("/")[0]].append(candidate)
    ranks = [rank for files in folders.values() for rank in {candidate.rank for candidate in files}]
    if len(set(ranks)) < len(ranks):  # a rank occurs in two folders
        dated = [(max(c.raw.last_event_ns() for c in files), files) for files in folders.values()]
        number = max(numbered.values(), default=-1)
        latest = -1
        for newest, files in sorted(dated, key=lambda one: (one[0], one[1][0].path)):
            if newest != latest or newest == 0:  # the same moment: the same dumps in another format
                number += 1
            latest = newest
            numbered.update({candidate.path: number for candidate in files})
    else:
        number = max(numbered.values(), default=0)
        numbered.update({candidate.path: number for candidate in open_ones})
    return numbered


def _newest(candidates: list[TraceFile], numbered: dict[str, int]) -> int | None:
    """The attempt with the latest event; the higher number where times do not tell."""
    best: dict[int, int] = defaultdict(int)
    if len(set(numbered.values())) == 1:
        return next(iter(numbered.values()))
    for candidate in candidates:
        number = numbered[candidate.path]
        best[number] = max(best[number], candidate.raw.last_event_ns())
    return max(best, key=lambda number: (best[number], number)) if best else None


def _goodness(candidate: TraceFile) -> tuple[bool, bool, bool, int, bool, bool, str]:
    """A whole file beats a damaged one, a black box a dump, a later one an earlier one, one that tells more."""
    raw = candidate.raw
    return (
        not raw.damaged,
        raw.kind.startswith("black box") and len(raw.calls) > 0,
        len(raw.calls) > 0,
        raw.last_event_ns(),
        bool(len(raw.calls) and raw.calls["stack"].any()),
        any(group.ranks for group in raw.groups),
        candidate.path,
    )


#: A dump's modification time is when it was taken only if it lies so close behind the last timeout; else it was copied.
MAX_DUMP_DELAY_NS = 300 * 10**9


def load_paths(paths: Sequence[str], options: LoadOptions | None = None) -> LoadResult:
    """Reads everything behind the paths. Raises InputError when a path does not exist or nothing was readable."""
    options = options or LoadOptions()
    sources = _find([str(path) for path in paths], options)
    with _no_collector():
        room = sum(source.size for source in sources) // CALL.itemsize
        # how many calls of each black box to read; 0: all
        each = options.newest_calls // len(sources) if 0 < options.newest_calls < room else 0
        result = _settle(_read(replace(options, newest_calls=each), sources), paths)
        if each and options.newest_calls // max(1, len(result.traces)) != each:
            # Not every file was one of the job.
            result = _settle(_read(replace(options, newest_calls=0), sources), paths)
        return result


def _find(paths: list[str], options: LoadOptions) -> list[DumpSource]:
    """The files behind the paths; a folder that gives no answer becomes a file that cannot be read."""
    if any("://" in path for path in paths):  # these keep limits of their own
        return list(find_sources(paths, options))
    found, all_of_them = take_within(find_sources(paths, options), options.read_limit_s)
    if not all_of_them:
        problem = f"no answer within {options.read_limit_s:g} s after {len(found)} files were found"
        found.append(DumpSource(", ".join(paths), "", problem=problem, unopened=True))
    return found


def _read(options: LoadOptions, sources: list[DumpSource]) -> Share:
    total, show = len(sources), options.progress or (lambda done, total: None)
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
    choices = choose(files, load.options.attempt)
    for file in (file for choice in choices for file in choice.chosen):
        file.raw.header = replace(file.raw.header, rank=file.rank, attempt=file.attempt or 0)
    _join_worlds(choices[0].chosen, load.reader.tables)
    chosen = number_worlds([choice.chosen for choice in choices], load.reader.tables.group)
    tables = load.reader.tables.freeze()
    traces = [file.raw.as_trace(*tables, file.path) for file in chosen]
    for one in chosen:
        status: Literal["ok", "damaged"] = "damaged" if one.raw.damaged else "ok"
        notes.append(FileNote(one.path, one.rank, one.raw.kind, status, "; ".join(one.raw.notes)))
    notes += [
        FileNote(c.path, c.rank, c.raw.kind, "skipped", reason) for x in choices for c, reason in x.dropped
    ]
    notes += _failures(load)
    other = [source.location for source, error in load.failed if error.kind == "stacks"]
    order = {source.path: index for index, (source, _) in enumerate(load.raws)}
    notes.sort(key=lambda note: (note.rank is None, note.rank or 0, order.get(note.path, 0), note.path))
    if not traces and not other and not load.options.allow_nothing:
        shown = ", ".join(map(str, paths))
        if not notes:
            raise InputError(
                f"{shown}: no files", hint="Give the folder that holds the dumps or black boxes."
            )
        details = [f"  {note.path}: {note.kind}: {note.note}" for note in notes[:10]]
        details += [f"  … and {len(notes) - 10} more"] if len(notes) > 10 else []
        raise InputError(f"{shown}: none of {len(notes)} files is a readable dump", hint="\n".join(details))
    return LoadResult(traces, notes, other, choices[0].attempts, choices[0].attempt)


def _join_worlds(files: Sequence[TraceFile], tables: Tables) -> None:
    """Gives the group of all ranks its members: gloo's recorder writes the size of its newest group there instead."""
    counted = [
        (file, group)
        for file in files
        for group in file.raw.groups
        if group.backend == "gloo"
        and group.desc == "default_pg"
        and group.ranks == (*range(len(group.ranks)),)
    ]
    size = max((len(group.ranks) for _, group in counted), default=0)
    for file, group in counted:
        if len(group.ranks) < size and file.raw.kind.startswith("torch"):
            whole = tables.group(replace(group, ranks=tuple(range(size))))
            file.raw.groups = tuple(whole if one is group else one for one in file.raw.groups)
            file.raw.header = replace(file.raw.header, world_size=size)


def _ranked(load: Share) -> tuple[list[TraceFile], list[FileNote]]:
    """(the files whose rank is known and wanted, notes on the others)."""
    names = _file_ranks([source.path for source, _ in load.raws], load.options)
    files: list[TraceFile] = []
    notes: list[FileNote] = []
    for source, raw in load.raws:
        rank = raw.header.rank if raw.header.rank is not None else names.get(source.path, raw.rank_hint)
        if rank is None and load.options.number_unknown:
            used = {*(file.rank for file in files), *names.values()}
            rank = next(number for number in range(len(used) + 1) if number not in used)
        made = raw.kind.startswith("black box") and any(group.store for group in raw.groups)
        rank = -1 if rank is None and made else rank
        if rank is None or (load.options.ranks is not None and rank not in load.options.ranks):
            unknown = "its rank is not in the file or its name"
            problem = unknown if rank is None else "not among the selected ranks"
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


def _dated(source: DumpSource, raw: Raw) -> Raw:
    """Takes the file's modification time as the time of the dump, where that is plausible."""
    if raw.header.written_ns or not len(raw.calls):
        return raw
    last = raw.last_event_ns()
    limit = int(raw.calls["timeout_ms"].max()) * 10**6 + MAX_DUMP_DELAY_NS
    if last <= source.mtime_ns <= last + limit:
        raw.header = replace(raw.header, written_ns=source.mtime_ns, dated=True)
    return raw


def _failures(load: Share) -> list[FileNote]:
    """Notes of files that gave nothing; one that is damaged or cannot be opened still tells its rank by its name."""
    dumps = [source.path for source, error in load.failed if error.status != "skipped"]
    beside = [source.path for source, _ in load.raws]  # names tell ranks by what differs between them
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
