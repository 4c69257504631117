"""Which files are read as one job, and which of several files of a rank counts. Pure.

People mix the files of several jobs, attempts and processes in one folder. One job is chosen, its newest attempt, and of every rank
the best file.

Trainers and rollout engines may be recorded together: several worlds in one folder of black boxes. World rank 0 of two worlds is two
processes. Each process gets a number of the job; groups that were made by hand across worlds are joined by the store at which their
members meet.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from allranks.errors import InputError
from allranks.model.trace import Group, RankTrace, Raw, World

OVERLAP_NS = 1_000_000_000  # clocks of nodes may differ by less than this


@dataclass(frozen=True)
class TraceFile:
    """A readable file with its rank settled. `attempt` is None when neither header nor path tells; rank -1: it has none."""

    path: str
    rank: int
    attempt: int | None
    raw: Raw


@dataclass(frozen=True)
class FileChoice:
    """One file per rank, and for every other file the reason why not."""

    chosen: tuple[TraceFile, ...]
    dropped: tuple[tuple[TraceFile, str], ...]


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
    boxes = [c for c in candidates if c.raw.is_box]
    dumps = [c for c in candidates if not c.raw.is_box]
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
    if raw.is_box:
        return "job", raw.header.job
    ranks = max((group.ranks for group in raw.groups), key=len, default=())
    return "ranks", f"{ranks[0]}-{ranks[-1]}" if candidate.rank in ranks else ""


def _choose_attempt(candidates: list[TraceFile], wanted: int | None) -> FileChoice:
    numbered = number_attempts(candidates)
    attempts = tuple(sorted(set(numbered.values())))
    if wanted is not None and wanted not in attempts:
        raise InputError(f"no attempt {wanted} here; found {', '.join(map(str, attempts)) or 'none'}")
    if wanted is None and len(attempts) > 1 and attempts_overlap(candidates, numbered):
        return _newest_processes(candidates)
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
    return FileChoice(tuple(chosen), tuple(dropped))


def attempts_overlap(candidates: list[TraceFile], numbered: dict[str, int]) -> bool:
    """Whether replicas were restarted one by one: they have groups of replicas, or a rank lived on after another one's
    next attempt had begun.

    A restart of the whole job ends every rank before any begins again. Only black boxes tell when they began. A rank may
    live on without a trace of it: it hangs since before the other began again.
    """
    if not all(c.raw.is_box and c.raw.header.start_ns for c in candidates):
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


def _newest_processes(candidates: list[TraceFile]) -> FileChoice:
    """Of every rank the file of its newest process, whatever its attempt."""
    by_start = sorted(candidates, key=lambda c: (c.raw.header.start_ns, c.path))
    newest = {candidate.rank: candidate for candidate in by_start}
    chosen = tuple(newest[rank] for rank in sorted(newest))
    dropped = [
        (c, f"of an earlier process of rank {c.rank}, which was restarted by itself")
        for c in candidates
        if newest[c.rank] is not c
    ]
    return FileChoice(chosen, tuple(dropped))


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
        raw.is_box and len(raw.calls) > 0,
        len(raw.calls) > 0,
        raw.last_event_ns(),
        bool(len(raw.calls) and raw.calls["stack"].any()),
        any(group.ranks for group in raw.groups),
        candidate.path,
    )


def split_worlds(files: Sequence[TraceFile]) -> list[list[TraceFile]]:
    """The files of each world. All are one where no rank number is used twice at a time; dumps know no world."""
    boxes = [f for f in files if f.raw.is_box]
    replicas = any(g.name.startswith("replicas/") for f in boxes for g in f.raw.groups)
    if replicas or not _clash(boxes):
        return [[*files]]
    by_key: dict[str, list[TraceFile]] = defaultdict(list)
    for file in boxes:  # the rank of a process without a world is what it inherited
        by_key[_key(file)].append(replace(file, rank=-1) if _alone(file) else file)
    worlds: list[list[TraceFile]] = []
    for group in sorted(by_key.values(), key=_begin):
        known = next((world for world in worlds if not _apart(world, group)), None)
        if known is None:
            worlds.append([*group])
        else:
            known += group
    worlds[0] += [f for f in files if not f.raw.is_box]
    return [_numbered(world) for world in worlds]


def _clash(boxes: Sequence[TraceFile]) -> bool:
    """Whether two processes have one number at the same time, or have none."""
    newest: dict[int, TraceFile] = {}
    for file in sorted(boxes, key=lambda f: (f.raw.header.start_ns, f.path)):
        before = newest.get(file.rank)
        if file.rank < 0 or (before is not None and _beside([before], [file])):
            return True
        newest[file.rank] = file
    return False


def _beside(one: Sequence[TraceFile], other: Sequence[TraceFile]) -> bool:
    """Whether the later ones of these processes are not simply a restart of the earlier ones, in the same job."""
    if {f.raw.header.job for f in one} != {f.raw.header.job for f in other}:
        return False
    if _role(one) != _role(other):
        return True
    return max(f.raw.last_event_ns() for f in one) > min(f.raw.header.start_ns for f in other)


def _key(file: TraceFile) -> str:
    """Where a process meets the others of its world. A process that only made groups by hand has its role alone."""
    head, met = file.raw.header, file.raw.header.rendezvous
    return f"role {head.role}" if _alone(file) else met.address or met.store or head.launched.address


def _alone(file: TraceFile) -> bool:
    """Whether a process is in no world: it only made groups by hand. Rank and size of its environment are another one's."""
    made = any(group.store for group in file.raw.groups)
    return file.rank < 0 or (made and not file.raw.header.rendezvous.world_size)


def _begin(files: Sequence[TraceFile]) -> tuple[int, str]:
    return min(f.raw.header.start_ns for f in files), files[0].path


def _apart(one: Sequence[TraceFile], other: Sequence[TraceFile]) -> bool:
    """Whether both are worlds of their own: they share rank numbers, and one is not simply a restart of the other."""
    ranks, others = {f.rank for f in one}, {f.rank for f in other}
    if -1 in ranks | others:
        return _role(one) != _role(other) or ranks != others
    return bool(ranks & others) and _beside(one, other)


def _role(files: Sequence[TraceFile]) -> str:
    return Counter(f.raw.header.role for f in files).most_common(1)[0][0]


def _numbered(files: list[TraceFile]) -> list[TraceFile]:
    """Processes without a rank are counted by their place in a group, else by their start."""

    def place(file: TraceFile) -> tuple[int, int, str]:
        own = [g.own for g in file.raw.groups if g.store]
        return min(own, default=1 << 30), file.raw.header.start_ns, file.path

    if all(f.rank >= 0 for f in files):
        return files
    return [replace(f, rank=number) for number, f in enumerate(sorted(files, key=place))]


def number_worlds(worlds: Sequence[Sequence[TraceFile]], intern: Callable[[Group], Group]) -> list[TraceFile]:
    """The files with the numbers that their ranks have in the whole job; groups, peers and roots, too."""
    found: list[World] = []
    roles = Counter(_role(files) for files in worlds if files)
    for files in worlds if len(worlds) > 1 else ():
        first = found[-1].first + found[-1].size if found else 0
        size = max(max(0 if _alone(f) else f.raw.header.world_size or 0, f.rank + 1) for f in files)
        role = (_role(files) or "rank").replace("_", " ")
        same = sum(world.role.startswith(role) for world in found) + 1
        found.append(World(role if roles[_role(files)] == 1 else f"{role} (world {same})", first, size))
    offsets = [world.first for world in found] or [0]
    total = found[-1].first + found[-1].size if found else 0
    placed = [(f, offset) for files, offset in zip(worlds, offsets, strict=True) for f in files]
    members = _members_by_store(placed, total)
    if not found and not members:
        return [file for file, _ in placed]
    chosen = []
    for file, offset in placed:
        number = file.rank + offset
        raw = file.raw
        known = total or raw.header.world_size
        raw.header = replace(raw.header, rank=number, world_size=known, worlds=tuple(found))
        _move(raw, offset, members, intern)
        if found:
            raw.groups = tuple(intern(_of_world(g, raw.header.name.rpartition(" ")[0])) for g in raw.groups)
        chosen.append(replace(file, rank=number))
    return chosen


def _of_world(group: Group, role: str) -> Group:
    """A group of one world by a name that no other world has."""
    if group.store or not group.name:
        return group
    desc = f"{group.desc} of {role}" if group.desc else ""
    return replace(group, name=f"{role}/{group.name}", desc=desc)


_Store = tuple[str, str, int]  # address, name and size of a group


def _members_by_store(placed: Sequence[tuple[TraceFile, int]], total: int) -> dict[_Store, tuple[int, ...]]:
    """The members of each group that spans worlds, by their numbers in the job. One that has no black box is counted behind all
    others; a place that two processes claim says nothing."""
    claims: dict[_Store, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file, offset in placed:
        for group in file.raw.groups:
            if group.store and group.own >= 0:
                claims[_store_of(group)][group.own].add(file.rank + offset)
    unused = max([total, *(f.rank + offset + 1 for f, offset in placed)])
    found = {}
    for store, places in claims.items():
        if store[2] <= 0 or any(len(one) > 1 for one in places.values()):
            continue
        lacking = iter(range(unused, unused + store[2]))
        found[store] = tuple(
            min(places[place]) if place in places else next(lacking) for place in range(store[2])
        )
    return found


def _store_of(group: Group) -> _Store:
    return group.store, group.name, len(group.ranks)


def _move(
    raw: Raw, offset: int, members: dict[_Store, tuple[int, ...]], intern: Callable[[Group], Group]
) -> None:
    """Changes the groups of a file, and the ranks that its calls name, to numbers of the job."""
    groups = list(raw.groups)
    for index, group in enumerate(groups):
        listed = members.get(_store_of(group)) if group.store else None
        if listed is None and not offset:
            continue
        ranks = listed or tuple(rank + offset for rank in group.ranks)
        groups[index] = intern(replace(group, ranks=ranks))
        for column in ("peer", "root"):
            rows = (raw.calls["group"] == index) & (raw.calls[column] >= 0)
            if rows.any():
                old = raw.calls[column][rows]
                table = np.array(listed or [], np.int32)
                raw.calls[column][rows] = (
                    table[np.minimum(old, len(table) - 1)] if listed is not None else old + offset
                )
    raw.groups = tuple(groups)


def transform_ft(trace: RankTrace, group_world_size: int) -> RankTrace:
    """torchft numbers the ranks of each replica from 0: the trace with the default group's members, and the peers in it, moved by the
    replica's first rank."""
    rank = trace.header.rank
    if rank is None or group_world_size < 1:
        return trace
    offset = rank // group_world_size * group_world_size
    if offset == 0:
        return trace
    moved = [index for index, group in enumerate(trace.groups) if group.desc == "default_pg" and group.ranks]
    groups = list(trace.groups)
    calls = trace.calls.copy()
    for index in moved:
        groups[index] = replace(groups[index], ranks=tuple(rank + offset for rank in groups[index].ranks))
        for column in ("peer", "root"):
            rows = (calls["group"] == index) & (calls[column] >= 0)
            calls[column][rows] += offset
    return replace(trace, groups=tuple(groups), calls=calls)
