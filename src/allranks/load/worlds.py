"""Several worlds in one folder of black boxes: trainers and rollout engines that were recorded together. Pure.

World rank 0 of two worlds is two processes. Each process gets a number of the job; groups that were made by hand across worlds
are joined by the store at which their members meet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from allranks.model.trace import Group, Raw, World


@dataclass(frozen=True)
class TraceFile:
    """A readable file with its rank settled. `attempt` is None when neither header nor path tells; rank -1: it has none."""

    path: str
    rank: int
    attempt: int | None
    raw: Raw


def split_worlds(files: Sequence[TraceFile]) -> list[list[TraceFile]]:
    """The files of each world. All are one where no rank number is used twice at a time; dumps know no world."""
    boxes = [f for f in files if f.raw.kind.startswith("black box")]
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
    worlds[0] += [f for f in files if not f.raw.kind.startswith("black box")]
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
