"""Process groups of single ranks → groups of the job. Names alone are not enough, and members may be unknown.

Two ranks mean the same group when name, library and members agree. Where a rank does not know the members (gloo's
own recorder, once there are subgroups) it joins the group of that name that lists it, if there is exactly one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from allranks.diagnose.job import GroupView
from allranks.model.trace import Group, RankTrace

VAGUE = ("", "undefined")


@dataclass
class _Draft:
    """A group of the job while it is put together. members None: unknown."""

    name: str
    backend: str
    members: tuple[int, ...] | None
    descs: Counter[str] = field(default_factory=Counter)
    order: tuple[int, ...] = ()

    @property
    def desc(self) -> str:
        # torchcomms writes the library's name where torch writes the description.
        known = [(count, desc) for desc, count in self.descs.items() if desc not in (*VAGUE, self.backend)]
        return max(known)[1] if known else ""


def resolve_groups(
    by_rank: dict[int, RankTrace], pg_filters: frozenset[str]
) -> tuple[list[GroupView], dict[int, np.ndarray]]:
    """The groups of the job, and per rank the map from its own group index to the job's (-1: none)."""
    named: dict[str, list[tuple[Group, list[tuple[int, int]]]]] = defaultdict(list)
    uses: dict[int, list[tuple[int, int]]] = {}
    none = Group("")
    for rank in sorted(by_rank):
        for index, group in enumerate(by_rank[rank].groups):
            if index == 0 and group == none:
                continue
            if id(group) not in uses:
                uses[id(group)] = []
                named[group.name].append((group, uses[id(group)]))
            uses[id(group)].append((rank, index))
    drafts: list[_Draft] = []
    numbers = {rank: np.full(len(trace.groups), -1, np.int32) for rank, trace in by_rank.items()}
    for name in sorted(named):
        _resolve_name(name, named[name], drafts, numbers)
    return _label(drafts, numbers, pg_filters)


def _resolve_name(
    name: str,
    entries: list[tuple[Group, list[tuple[int, int]]]],
    drafts: list[_Draft],
    numbers: dict[int, np.ndarray],
) -> None:
    """All groups of one name: first those with known members, then the others join or found their own."""
    here: dict[tuple[tuple[int, ...] | None, str], int] = {}

    def number_of(members: tuple[int, ...] | None, group: Group, rank: int) -> int:
        """The one draft that fits, or a new one."""
        fits = [
            number
            for (known, backend), number in here.items()
            if (known == members if members else known and rank in known) and group.backend in ("", backend)
        ]
        if fits and (members or len(fits) == 1):
            return fits[0]
        key = (members, group.backend)
        if key not in here:
            here[key] = len(drafts)
            drafts.append(_Draft(name, group.backend, members))
        return here[key]

    # Known members and library first: what is vaguer then finds its place.
    for group, uses in sorted(entries, key=lambda entry: (not entry[0].ranks, not entry[0].backend)):
        members = tuple(sorted(set(group.ranks))) or None
        number = number_of(members, group, -1) if members else -1
        for rank, index in uses:
            number = number if members else number_of(None, group, rank)
            numbers[rank][index] = number
            drafts[number].descs[group.desc] += 1
            drafts[number].order = drafts[number].order or group.ranks


def _label(
    drafts: list[_Draft], numbers: dict[int, np.ndarray], pg_filters: frozenset[str]
) -> tuple[list[GroupView], dict[int, np.ndarray]]:
    """Gives every group a name for sentences, and leaves out what the user filtered."""
    descs = Counter(draft.desc for draft in drafts)
    names = Counter(draft.name for draft in drafts)
    views: list[GroupView] = []
    keep = np.full(len(drafts) + 1, -1, np.int32)
    for index, draft in enumerate(drafts):
        label = draft.desc if draft.desc and descs[draft.desc] == 1 else draft.name
        if names[draft.name] > 1 and label == draft.name:
            label = f"{draft.name or 'unnamed'}{_short(draft)}"
        if pg_filters and not pg_filters & {draft.name, draft.desc, label}:
            continue
        keep[index] = len(views)
        known = draft.members is not None
        named = (draft.name, draft.desc, draft.backend, label or "unnamed")
        views.append(GroupView(len(views), *named, draft.members or (), known, draft.order))
    return views, {rank: keep[own] for rank, own in numbers.items()}


def _short(draft: _Draft) -> str:
    """Tells groups of equal name apart."""
    if not draft.members:
        return f" ({draft.backend})" if draft.backend else ""
    shown = ",".join(map(str, draft.members[:4])) + (",…" if len(draft.members) > 4 else "")
    return f"[{shown}]" + (f" ({draft.backend})" if draft.backend else "")


def is_world(group: GroupView) -> bool:
    """Whether this is the group of all ranks."""
    return group.desc == "default_pg" or group.name == "0"


def expected_ranks(by_rank: dict[int, RankTrace], groups: list[GroupView]) -> frozenset[int]:
    """Ranks that the job must have: group members, world size; holes in the numbering when nothing else tells."""
    expected = set(by_rank)
    for group in groups:
        expected.update(group.members)
    sizes = [trace.header.world_size or 0 for trace in by_rank.values()]
    expected.update(range(max(sizes, default=0)))
    worlds = [group for group in groups if is_world(group)]
    if any(not group.members_known for group in worlds) and by_rank:
        expected.update(range(max(by_rank) + 1))
    return frozenset(expected)
