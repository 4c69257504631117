"""Whose file is it, and which of several files of a rank counts? Ranks read from names, attempts told apart, duplicates
dropped. Pure.

torch writes the rank into the file name and nowhere else, behind whatever prefix the user chose; people add hosts,
suffixes, dates and attempts. A number that is a process id, a date or a host's is not a rank.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from allranks.errors import InputError
from allranks.load.sources import Raw

OVERLAP_NS = 1_000_000_000  # clocks of nodes may differ by less than this


@dataclass(frozen=True)
class TraceFile:
    """A readable file with its rank settled. `attempt` is None when neither header nor path tells."""

    path: str
    rank: int
    attempt: int | None
    raw: Raw


@dataclass(frozen=True)
class FileChoice:
    """One file per rank, and for every other file the reason why not."""

    chosen: tuple[TraceFile, ...]
    dropped: tuple[tuple[TraceFile, str], ...]
    attempts: tuple[int, ...]
    attempt: int | None


def choose(candidates: list[TraceFile], wanted: int | None) -> FileChoice:
    """The newest job, in it the newest attempt (or the wanted one), and in that the best file of every rank."""
    candidates, of_others = _newest_job(candidates)
    choice = _choose_attempt(candidates, wanted)
    return replace(choice, dropped=(*of_others, *choice.dropped))


def _newest_job(
    candidates: list[TraceFile],
) -> tuple[list[TraceFile], list[tuple[TraceFile, str]]]:
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
        best, *rest = by_rank[rank]
        if rest:
            best, *rest = sorted(by_rank[rank], key=_goodness, reverse=True)
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
    numbers = sorted(begun)
    pairs = itertools.pairwise(numbers)
    return any(ended[earlier] > begun[later] + OVERLAP_NS for earlier, later in pairs)


def _newest_processes(candidates: list[TraceFile], attempts: tuple[int, ...]) -> FileChoice:
    """Of every rank the file of its newest process, whatever its attempt."""
    newest: dict[int, TraceFile] = {}
    for candidate in candidates:
        known = newest.get(candidate.rank)
        if known is None or _started(candidate) > _started(known):
            newest[candidate.rank] = candidate
    chosen = tuple(newest[rank] for rank in sorted(newest))
    dropped = [
        (c, f"of an earlier process of rank {c.rank}, which was restarted by itself")
        for c in candidates
        if newest[c.rank] is not c
    ]
    return FileChoice(chosen, tuple(dropped), attempts, attempts[-1])


def _started(candidate: TraceFile) -> tuple[int, str]:
    return (candidate.raw.header.start_ns, candidate.path)


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
    if len(folders) > 1 and _overlap(list(folders.values())):
        order = sorted(
            folders.values(), key=lambda files: (max(c.raw.last_event_ns() for c in files), files[0].path)
        )
        number = max(numbered.values(), default=-1)
        latest = -1
        for files in order:
            newest = max(c.raw.last_event_ns() for c in files)
            if newest != latest or newest == 0:  # the same moment: the same dumps in another format
                number += 1
            latest = newest
            numbered.update({candidate.path: number for candidate in files})
    else:
        number = max(numbered.values(), default=0)
        numbered.update({candidate.path: number for candidate in open_ones})
    return numbered


def _overlap(folders: list[list[TraceFile]]) -> bool:
    """Whether a rank occurs in two folders."""
    seen: set[int] = set()
    for files in folders:
        ranks = {candidate.rank for candidate in files}
        if ranks & seen:
            return True
        seen |= ranks
    return False


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


_EXTENSIONS = re.compile(
    r"(\.(pickle|pkl|pk|json|txt|bin|dat|dump|log|bak|old|orig|tmp|copy|gz|zst|zstd|tgz|tar|box|trace))+$",
    re.I,
)
_BOX = re.compile(r"\.a(\d+)\.r(\d+)\.p(\d+)\.box")
_EXPLICIT = re.compile(r"(?<![A-Za-z])(local[_\-. ]?)?rank[_\-. =]*(\d+)", re.I)
_TRACE = re.compile(r"(?:trace|dump|fr|box)[_\-. ]?(\d+)(?!\d)", re.I)
_SHORT = re.compile(r"(?<![A-Za-z0-9])r[_\-]?(\d+)(?![A-Za-z0-9])", re.I)
_NUMBER = re.compile(r"\d+")
_ATTEMPT = re.compile(
    r"(?:attempt|restart|retry|try|gen|generation)[_\-. =]*(\d+)|(?<![A-Za-z0-9])a(\d+)(?=[._\-/]|$)", re.I
)
#: No job has so many ranks; larger numbers are process ids, dates or times.
MAX_RANK = 999_999


def rank_by_prefix(name: str, prefix: str) -> int | None:
    """The digits right after the prefix, which may have a host or anything else before it."""
    match = re.search(re.escape(prefix) + r"(\d+)", name)
    return _plausible(match.group(1)) if match else None


def rank_of_name(path: str) -> int | None:
    """The rank that one path tells by itself, without looking at its neighbours; None when it does not."""
    parts = path.replace("\\", "/").split("/")
    name = parts[-1]
    box = _BOX.search(name)
    if box:
        return int(box.group(2))
    for part in (name, *reversed(parts[:-1][-3:])):
        found = _explicit(part)
        if found is not None:
            return found
    return _of_stem(name)


def _of_stem(name: str) -> int | None:
    """The rank in "trace_3" or "dump.r3"."""
    stem = _EXTENSIONS.sub("", name)
    for pattern in (_TRACE, _SHORT):
        matches = [_plausible(match.group(1)) for match in pattern.finditer(stem)]
        matches = [rank for rank in matches if rank is not None]
        if matches:
            return matches[-1]
    return None


def ranks_of_names(paths: Iterable[str]) -> dict[str, int]:
    """Ranks for a whole set of files: those that tell by themselves, then the rest by what tells them apart.

    Names that differ only in numbers form a family; the column of numbers that is different for every member is
    the rank (the last one, if there are several). A file alone gives its last plausible number.
    """
    found: dict[str, int] = {}
    families: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        rank = rank_of_name(path)
        if rank is not None:
            found[path] = rank
        else:
            name = path.rpartition("/")[2]
            stem = _EXTENSIONS.sub("", name)
            families[_NUMBER.sub("#", stem)].append(path)
    for skeleton, members in families.items():
        if "#" in skeleton:
            found.update(_family_ranks(members))
    return found | _not_of_folder(found)


def _not_of_folder(found: dict[str, int]) -> dict[str, int]:
    """The files of one folder that got one rank from its name ("debug_rank_0/trace_1"), by their own names where these differ."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in found:
        folders[path.rpartition("/")[0]].append(path)
    better: dict[str, int] = {}
    for folder, paths in folders.items():
        if len(paths) > 1 and _explicit(folder) is not None:
            names = {path: path.rpartition("/")[2] for path in paths}
            own = {path: rank for path, name in names.items() if (rank := _of_stem(name)) is not None}
            if not any(map(_explicit, names.values())) and len(set(own.values())) == len(paths):
                better |= own
    return better


def _family_ranks(members: list[str]) -> dict[str, int]:
    rows = [
        [_plausible(n) for n in _NUMBER.findall(_EXTENSIONS.sub("", p.rpartition("/")[2]))] for p in members
    ]
    columns = list(zip(*rows, strict=False))
    usable = [column for column in columns if None not in column]
    distinct = [column for column in usable if len(set(column)) == len(members)]
    best = distinct or usable
    if not best:
        return {}
    return {path: rank for path, rank in zip(members, best[-1], strict=False) if rank is not None}


def _explicit(part: str) -> int | None:
    """ "rank_3", but not "local_rank_3" when the global one stands there too."""
    matches = [(bool(m.group(1)), _plausible(m.group(2))) for m in _EXPLICIT.finditer(part)]
    ranks = [rank for local, rank in matches if not local and rank is not None]
    return ranks[-1] if ranks else None


def attempt_of_name(path: str) -> int | None:
    """The attempt that a path names (attempt_2/, restart1, job.a2.r0...), innermost first; None when it names none."""
    for part in reversed(path.replace("\\", "/").split("/")):
        matches = list(_ATTEMPT.finditer(part))
        if matches:
            number = matches[-1].group(1) or matches[-1].group(2)
            return int(number) if len(number) < 7 else None
    return None


def _plausible(digits: str) -> int | None:
    """A number that can be a rank: not a date, a time or a process id with leading zeros."""
    if len(digits) > 6 or int(digits) > MAX_RANK:
        return None
    return int(digits)
