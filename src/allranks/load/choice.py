"""Chooses the files of one job, and one file of each rank. Pure.

A folder may mix files of several jobs, attempts and processes. The newest job and its newest attempt are chosen, and the
best file of every rank.

Trainers and rollout engines may be recorded together, as several worlds in one folder of black boxes. Rank 0 of two worlds is
then two processes, so each process gets a number in the job. Groups across worlds are matched by the address of their store.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from allranks.errors import InputError
from allranks.model.trace import Group, RankTrace, World

OVERLAP_NS = 1_000_000_000  # tolerance for differences between the clocks of nodes


@dataclass(frozen=True)
class TraceFile:
    """A readable file and its rank (-1: none). `attempt` is None if neither header nor path contains it."""

    path: str
    rank: int
    attempt: int | None
    trace: RankTrace


@dataclass(frozen=True)
class FileChoice:
    """One file per rank, and the other files with the reason."""

    chosen: tuple[TraceFile, ...]
    dropped: tuple[tuple[TraceFile, str], ...]


def choose(candidates: list[TraceFile], wanted: int | None) -> list[FileChoice]:
    """One choice per world of the newest job: the best file of every rank in the newest (or wanted) attempt."""
    candidates, of_others = _newest_job(candidates)
    candidates, of_another = _newer_kind(candidates)
    found = [_choose_attempt(world, wanted) for world in split_worlds(candidates)]
    return [replace(found[0], dropped=(*of_others, *of_another, *found[0].dropped)), *found[1:]]


def _newest_job(candidates: list[TraceFile]) -> tuple[list[TraceFile], list[tuple[TraceFile, str]]]:
    """(files of the newest job, the others with the reason), for files of several jobs with the same ranks."""
    jobs: dict[tuple[str, str], list[TraceFile]] = defaultdict(list)
    for candidate in candidates:
        kind, job = _job_of(candidate)
        if job:
            jobs[kind, job].append(candidate)
    other: dict[str, str] = {}
    for kind in ("job", "ranks"):
        found = {job: files for (each, job), files in jobs.items() if each == kind and len(files) > 1}
        newest = max(found, key=lambda job: max(c.trace.last_event_ns() for c in found[job]), default="")
        ranks = {c.rank for c in found.get(newest, ())}
        for job, files in found.items():
            if job != newest and any(c.rank in ranks for c in files):
                why = f"belongs to {kind} {job}, but {kind} {newest} is newer: give the files of one job"
                other |= {c.path: why for c in files}
    rest = [c for c in candidates if c.path not in other]
    return rest, [(c, other[c.path]) for c in candidates if c.path in other]


def _newer_kind(candidates: list[TraceFile]) -> tuple[list[TraceFile], list[tuple[TraceFile, str]]]:
    """(the newer files, the others with the reason), if dumps have ranks that the job of the black boxes lacks."""
    boxes = [c for c in candidates if c.trace.is_box]
    dumps = [c for c in candidates if not c.trace.is_box]
    size, needed = _world_of(boxes), _world_of(dumps)
    known = any((c.trace.header.world_size or 0) > 1 for c in boxes)
    if not known or needed <= size:
        return candidates, []
    newest = {id(files): max(c.trace.last_event_ns() for c in files) for files in (boxes, dumps)}
    kept, left = (dumps, boxes) if newest[id(dumps)] > newest[id(boxes)] else (boxes, dumps)
    why = f"the black boxes are from a job of {size} ranks, the dumps from one of {needed} or more: give the files of one job"
    return kept, [(c, why) for c in left]


def _world_of(files: list[TraceFile]) -> int:
    """Minimum number of ranks, from the groups in the files; 0 unknown."""
    groups = [group.ranks for c in files for group in c.trace.groups if len(group.ranks) > 1]
    stated = max((c.trace.header.world_size or 0 for c in files), default=0)
    return max(1 + max(map(max, groups)), stated) if groups else 0


def _job_of(candidate: TraceFile) -> tuple[str, str]:
    """("job", name) of a black box; ("ranks", those of the largest group) of a dump, which has no job name."""
    trace = candidate.trace
    if trace.is_box:
        return "job", trace.header.job
    ranks = max((group.ranks for group in trace.groups), key=len, default=())
    return "ranks", f"{ranks[0]}-{ranks[-1]}" if candidate.rank in ranks else ""


def _choose_attempt(candidates: list[TraceFile], wanted: int | None) -> FileChoice:
    numbered = number_attempts(candidates)
    attempts = tuple(sorted(set(numbered.values())))
    if wanted is not None and wanted not in attempts:
        raise InputError(f"no attempt {wanted}; found {', '.join(map(str, attempts)) or 'none'}")
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
            dropped.append((candidate, f"from attempt {number}, not {picked}"))
        else:
            dropped.append((candidate, f"from attempt {number}; attempt {picked} is newer"))
    chosen = []
    for rank in sorted(by_rank):
        files = by_rank[rank]
        best, *rest = sorted(files, key=_goodness, reverse=True) if len(files) > 1 else files
        chosen.append(best)
        dropped += [(other, f"rank {rank} is read from {best.path}") for other in rest]
    return FileChoice(tuple(chosen), tuple(dropped))


def attempts_overlap(candidates: list[TraceFile], numbered: dict[str, int]) -> bool:
    """Whether replicas were restarted individually: there are groups of replicas, or a rank was still active after the next
    attempt of another rank had started.

    A restart of the whole job ends all ranks first. Only black boxes contain the start time. A rank that was hanging before
    the restart of another one is not detected.
    """
    if not all(c.trace.is_box and c.trace.header.start_ns for c in candidates):
        return False
    if any(group.name.startswith("replicas/") for c in candidates for group in c.trace.groups):
        return True
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    for candidate in candidates:
        number, begin = numbered[candidate.path], candidate.trace.header.start_ns
        begun[number] = min(begun.get(number, begin), begin)
        ended[number] = max(ended.get(number, 0), candidate.trace.last_event_ns())
    pairs = itertools.pairwise(sorted(begun))
    return any(ended[earlier] > begun[later] + OVERLAP_NS for earlier, later in pairs)


def _newest_processes(candidates: list[TraceFile]) -> FileChoice:
    """The file of the newest process of each rank, in any attempt."""
    by_start = sorted(candidates, key=lambda c: (c.trace.header.start_ns, c.path))
    newest = {candidate.rank: candidate for candidate in by_start}
    chosen = tuple(newest[rank] for rank in sorted(newest))
    dropped = [
        (c, f"from an earlier process of rank {c.rank}, which was restarted individually")
        for c in candidates
        if newest[c.rank] is not c
    ]
    return FileChoice(chosen, tuple(dropped))


def number_attempts(candidates: list[TraceFile]) -> dict[str, int]:
    """An attempt number for every file: the number in the file, else by folder.

    Files without a number form one attempt if no rank occurs in two folders. Otherwise every folder is an attempt, numbered
    by time after the known numbers.
    """
    numbered = {c.path: c.attempt for c in candidates if c.attempt is not None}
    open_ones = [c for c in candidates if c.attempt is None]
    folders: dict[str, list[TraceFile]] = defaultdict(list)
    for candidate in open_ones:
        folders[candidate.path.rpartition("/")[0]].append(candidate)
    ranks = [rank for files in folders.values() for rank in {candidate.rank for candidate in files}]
    if len(set(ranks)) < len(ranks):  # a rank occurs in two folders
        dated = [(max(c.trace.last_event_ns() for c in files), files) for files in folders.values()]
        number = max(numbered.values(), default=-1)
        latest = -1
        for newest, files in sorted(dated, key=lambda one: (one[0], one[1][0].path)):
            if newest != latest or newest == 0:  # the same time: the same dumps in another format
                number += 1
            latest = newest
            numbered.update({candidate.path: number for candidate in files})
    else:
        number = max(numbered.values(), default=0)
        numbered.update({candidate.path: number for candidate in open_ones})
    return numbered


def _newest(candidates: list[TraceFile], numbered: dict[str, int]) -> int | None:
    """The attempt with the latest event, or the highest number if the times are equal."""
    best: dict[int, int] = defaultdict(int)
    if len(set(numbered.values())) == 1:
        return next(iter(numbered.values()))
    for candidate in candidates:
        number = numbered[candidate.path]
        best[number] = max(best[number], candidate.trace.last_event_ns())
    return max(best, key=lambda number: (best[number], number)) if best else None


def _goodness(candidate: TraceFile) -> tuple[bool, bool, bool, int, bool, bool, str]:
    """Sort key: prefers undamaged files, black boxes, files with calls, later ones, ones with stacks and members."""
    trace = candidate.trace
    return (
        not trace.damaged,
        trace.is_box and len(trace.calls) > 0,
        len(trace.calls) > 0,
        trace.last_event_ns(),
        bool(len(trace.calls) and trace.calls["stack"].any()),
        any(group.ranks for group in trace.groups),
        candidate.path,
    )


def split_worlds(files: Sequence[TraceFile]) -> list[list[TraceFile]]:
    """The files of each world: one world unless two processes use the same rank at the same time. Dumps go to the first."""
    boxes = [f for f in files if f.trace.is_box]
    replicas = any(g.name.startswith("replicas/") for f in boxes for g in f.trace.groups)
    if replicas or not _clash(boxes):
        return [[*files]]
    by_key: dict[str, list[TraceFile]] = defaultdict(list)
    for file in boxes:  # a process without a world has inherited its rank
        by_key[_key(file)].append(replace(file, rank=-1) if _alone(file) else file)
    worlds: list[list[TraceFile]] = []
    for group in sorted(by_key.values(), key=_begin):
        known = next((world for world in worlds if not _apart(world, group)), None)
        if known is None:
            worlds.append([*group])
        else:
            known += group
    worlds[0] += [f for f in files if not f.trace.is_box]
    return [_numbered(world) for world in worlds]


def _clash(boxes: Sequence[TraceFile]) -> bool:
    """Whether two processes have the same rank at the same time, or one has no rank."""
    newest: dict[int, TraceFile] = {}
    for file in sorted(boxes, key=lambda f: (f.trace.header.start_ns, f.path)):
        before = newest.get(file.rank)
        if file.rank < 0 or (before is not None and _simultaneous([before], [file])):
            return True
        newest[file.rank] = file
    return False


def _simultaneous(one: Sequence[TraceFile], other: Sequence[TraceFile]) -> bool:
    """Whether these processes belong to one job and the later ones are not a restart of the earlier ones."""
    if {f.trace.header.job for f in one} != {f.trace.header.job for f in other}:
        return False
    if _role(one) != _role(other):
        return True
    return max(f.trace.last_event_ns() for f in one) > min(f.trace.header.start_ns for f in other)


def _key(file: TraceFile) -> str:
    """Identifies the world of a process: its rendezvous address, or its role if it has no world."""
    head, met = file.trace.header, file.trace.header.rendezvous
    return f"role {head.role}" if _alone(file) else met.address or met.store or head.launched.address


def _alone(file: TraceFile) -> bool:
    """Whether a process has no world, because it created its groups without init_process_group."""
    made = any(group.store for group in file.trace.groups)
    return file.rank < 0 or (made and not file.trace.header.rendezvous.world_size)


def _begin(files: Sequence[TraceFile]) -> tuple[int, str]:
    return min(f.trace.header.start_ns for f in files), files[0].path


def _apart(one: Sequence[TraceFile], other: Sequence[TraceFile]) -> bool:
    """Whether these are two worlds: they share rank numbers, and one is not a restart of the other."""
    ranks, others = {f.rank for f in one}, {f.rank for f in other}
    if -1 in ranks | others:
        return _role(one) != _role(other) or ranks != others
    return bool(ranks & others) and _simultaneous(one, other)


def _role(files: Sequence[TraceFile]) -> str:
    return Counter(f.trace.header.role for f in files).most_common(1)[0][0]


def _numbered(files: list[TraceFile]) -> list[TraceFile]:
    """Numbers processes without a rank by their index in a group, else by start time."""

    def place(file: TraceFile) -> tuple[int, int, str]:
        own = [g.own for g in file.trace.groups if g.store]
        return min(own, default=1 << 30), file.trace.header.start_ns, file.path

    if all(f.rank >= 0 for f in files):
        return files
    return [replace(f, rank=number) for number, f in enumerate(sorted(files, key=place))]


def number_worlds(worlds: Sequence[Sequence[TraceFile]], intern: Callable[[Group], Group]) -> list[TraceFile]:
    """The files with rank numbers of the whole job, also in groups, peers and roots."""
    found: list[World] = []
    roles = Counter(_role(files) for files in worlds if files)
    for files in worlds if len(worlds) > 1 else ():
        first = found[-1].first + found[-1].size if found else 0
        size = max(max(0 if _alone(f) else f.trace.header.world_size or 0, f.rank + 1) for f in files)
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
        number, trace = file.rank + offset, file.trace
        known = total or trace.header.world_size
        header = replace(trace.header, rank=number, world_size=known, worlds=tuple(found))
        groups = _moved_groups(trace, offset, members, intern)
        if found:
            groups = tuple(intern(_of_world(g, header.name.rpartition(" ")[0])) for g in groups)
        chosen.append(replace(file, rank=number, trace=replace(trace, header=header, groups=groups)))
    return chosen


def _of_world(group: Group, role: str) -> Group:
    """A group of one world, with a name that is unique in the job."""
    if group.store or not group.name:
        return group
    desc = f"{group.desc} of {role}" if group.desc else ""
    return replace(group, name=f"{role}/{group.name}", desc=desc)


_Store = tuple[str, str, int]  # address, name and size of a group


def _members_by_store(placed: Sequence[tuple[TraceFile, int]], total: int) -> dict[_Store, tuple[int, ...]]:
    """The members of each group across worlds, as numbers of the job.

    A member without a black box gets a new number after all others. Groups in which two processes claim an index are skipped.
    """
    claims: dict[_Store, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file, offset in placed:
        for group in file.trace.groups:
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


def _moved_groups(
    trace: RankTrace, offset: int, members: dict[_Store, tuple[int, ...]], intern: Callable[[Group], Group]
) -> tuple[Group, ...]:
    """The groups with numbers of the job. Also changes the ranks in the calls, in place."""
    groups, calls = list(trace.groups), trace.calls
    for index, group in enumerate(groups):
        listed = members.get(_store_of(group)) if group.store else None
        if listed is None and not offset:
            continue
        ranks = listed or tuple(rank + offset for rank in group.ranks)
        groups[index] = intern(replace(group, ranks=ranks))
        for column in ("peer", "root"):
            rows = (calls["group"] == index) & (calls[column] >= 0)
            if rows.any():
                old = calls[column][rows]
                table = np.array(listed or [], np.int32)
                calls[column][rows] = (
                    table[np.minimum(old, len(table) - 1)] if listed is not None else old + offset
                )
    return tuple(groups)


def transform_ft(trace: RankTrace, group_world_size: int) -> RankTrace:
    """Adds the replica's first rank to the members and peers of the default group: torchft numbers each replica from 0."""
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
