"""RankTrace per rank → Job: groups as the whole job knows them, and one lane of collectives per (group, rank). Pure.

Alignment is by per-group sequence number. Record ids are per process and say nothing across ranks. A lane knows
how far its ring reaches back (`first`), how far it got (`last`), and whether its end may have been cut off.

Two ranks mean the same group when name, library and members agree. Where a rank does not know the members (gloo's
own recorder, once there are subgroups) it joins the group of that name that lists it, if there is exactly one.

Before that, of replicas that come and go: their groups are made anew with every quorum, and what failed in an earlier one
is history (`forget_past_quorums`). torchft numbers the ranks of each replica from 0: `--transform-ft` moves them to where
they are in the whole job.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.diagnosis.job import GroupView, Job, JobTables, Lane, Now, Program, Programs, RankCalls
from allranks.model.trace import Flag, Group, RankTrace, State

_QUORUM = re.compile(r"^(replicas|votes)/(\d+)(/\d+)?$")


def forget_past_quorums(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without calls of groups of replicas that a later quorum has replaced.

    Members that were lost left their calls unfinished there, and the survivors went on in the next group: neither
    says anything about the present.
    """
    names = {group.name for trace in traces for group in trace.groups}
    newest = max(map(_number, names), default=-1)
    if newest < 0:
        return list(traces)
    return [_without(trace, newest) for trace in traces]


def without_replica_groups(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without calls of groups of replicas: the ranks of one replica are in different ones of the same name."""
    return [_without(trace, sys.maxsize) for trace in traces]


def only_replica_groups(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces with the calls of the newest groups of replicas only."""
    found = forget_past_quorums(traces)
    inside = [
        [i for i, group in enumerate(t.groups) if not group.name.startswith("replicas/")] for t in found
    ]
    kept = [~np.isin(t.calls["group"], past) for t, past in zip(found, inside, strict=True)]
    return [replace(t, calls=t.calls[rows]) for t, rows in zip(found, kept, strict=True)]


def _without(trace: RankTrace, newest: int) -> RankTrace:
    past = [index for index, group in enumerate(trace.groups) if 0 <= _number(group.name) < newest]
    if not past or not len(trace.calls):
        return trace
    return replace(trace, calls=trace.calls[~np.isin(trace.calls["group"], past)])


def _number(name: str) -> int:
    """The quorum of a group's name; -1 for groups of any other kind."""
    found = _QUORUM.match(name)
    return int(found[2]) if found else -1


def transform_ft(trace: RankTrace, group_world_size: int) -> RankTrace:
    """The trace with the default group's members, and the peers in it, moved by the replica's first rank."""
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


def align(
    traces: Iterable[RankTrace],
    *,
    cut: frozenset[int] = frozenset(),
    now_ns: int = 0,
    pg_filters: frozenset[str] = frozenset(),
    ended: bool = False,
) -> Job:
    """Builds the Job. `cut` are ranks whose file lost its end; `now_ns` is when live black boxes were read; `ended`:
    their processes are gone."""
    tables = JobTables()
    by_rank = {t.header.rank: t for t in traces if t.header.rank is not None}
    groups, numbers = resolve_groups(by_rank, pg_filters)
    programs = Programs(tables)
    # All that needs a rank's rows is done at once: they come from afar, and there may be gigabytes of them.
    placed = {
        rank: (programs.place(by_rank[rank]), call_states(by_rank[rank].calls)) for rank in sorted(by_rank)
    }
    ranks = {}
    for rank, (program, states) in placed.items():
        seen_ns = _seen_ns(by_rank[rank], now_ns)
        ranks[rank] = _view(by_rank[rank], program, numbers[rank], states, rank in cut, seen_ns)
        _add_lanes(ranks[rank], program, numbers[rank], groups)
    expected = expected_ranks(by_rank, groups)
    groups = [_complete(group, ranks, expected) for group in groups]
    world = _world_size(by_rank) or len(expected) or None
    return Job(ranks, tuple(groups), tables, world, tuple(sorted(expected - set(ranks))), now_ns, ended)


def call_states(calls: np.ndarray) -> np.ndarray:
    """Now per call, from its state and flags alone: one look into a table, because there may be 32 million."""
    states: np.ndarray = _STATES[calls["state"] | (calls["flags"] << 3)]
    return states


def _state_table() -> np.ndarray:
    """Now by state | flags << 3."""
    code = np.arange(1 << 16)
    state, flags = code & 7, code >> 3
    retired, unknown = (flags & int(Flag.RETIRED)) != 0, (flags & int(Flag.STATE_UNKNOWN)) != 0
    now = np.where(retired, np.where(unknown, int(Now.LEFT), int(Now.FAILED)), int(Now.OPEN))
    doubtful = (flags & int(Flag.COMPLETION_UNRELIABLE | Flag.ENDED_UNSEEN)) != 0
    now = np.where(state == int(State.COMPLETED), np.where(doubtful, int(Now.LEFT), int(Now.DONE)), now)
    now[(state == int(State.FAILED)) | (state == int(State.TIMED_OUT))] = int(Now.FAILED)
    now[(flags & int(Flag.COALESCED_PART | Flag.CAPTURED)) != 0] = int(Now.UNKNOWN)
    return now.astype(np.int8)


_STATES = _state_table()


def is_box(trace: RankTrace) -> bool:
    """Whether the trace is a black box, which is read live."""
    return trace.kind.startswith("black box")


def is_hook(trace: RankTrace) -> bool:
    """Whether torch's hook recorded the trace, which records backends without a recorder of their own."""
    return trace.kind.startswith("torch hook")


def _view(
    trace: RankTrace, program: Program, numbers: np.ndarray, states: np.ndarray, cut: bool, seen_ns: int
) -> RankCalls:
    start = _start(trace, program)
    mine = slice(start, start + len(trace.calls))
    of_program = (program.family[mine], program.sig[mine], program.stack[mine], numbers[program.local[mine]])
    known = (cut, seen_ns, program.has_p2p, program.has_batches)
    return RankCalls(trace.header.rank or 0, trace, states, *of_program, *known)


def _seen_ns(trace: RankTrace, now_ns: int) -> int:
    """When the rank was as its trace shows it; 0 unknown. A black box tells its last write, not when it was read, nor
    when its process was killed."""
    if is_box(trace) and (now_ns or not trace.progress.closed):
        return now_ns
    return trace.header.written_ns


def _start(trace: RankTrace, program: Program) -> int:
    """The place of the rank's first call in its program."""
    return int(trace.calls["begin"][0]) - program.first if len(trace.calls) else 0


def _add_lanes(view: RankCalls, program: Program, numbers: np.ndarray, groups: list[GroupView]) -> None:
    """Splits a rank's collectives by group and puts each into its GroupView."""
    start, wrapped = _start(view.trace, program), _wrapped(view.trace)
    of_job: list[int] = numbers.tolist()
    # Several own groups may be one group of the job: the first of them stands for all.
    own = tuple(of_job.index(number) if number >= 0 else -1 for number in of_job)
    steady = program.steady(own)
    for index, rows, seqs in program.parts(start, start + len(view.trace.calls), own):
        kin = (id(program), own, index) if index in steady else None
        lane = Lane.of(view.rank, rows, seqs, wrapped, view.cut, kin)
        groups[of_job[index]].lanes[view.rank] = lane


def _complete(group: GroupView, ranks: dict[int, RankCalls], expected: frozenset[int]) -> GroupView:
    """Settles the members, and gives members that never called anything in the group an empty lane."""
    members = group.members
    if not group.members_known:
        members = tuple(sorted(expected if is_world(group) else group.lanes))
        group = replace(group, members=members, order=members)
    empty = np.zeros(0, np.int64)
    for rank in members:
        view = ranks.get(rank)
        if view is not None and rank not in group.lanes:
            group.lanes[rank] = Lane.of(rank, empty, empty, _wrapped(view.trace), view.cut)
    return replace(group, lanes=dict(sorted(group.lanes.items())))


def _wrapped(trace: RankTrace) -> bool:
    return trace.header.dropped > 0 or (len(trace.calls) > 0 and int(trace.calls["begin"][0]) > 1)


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
        _resolve_name(name, _in_one_space(named[name]), drafts, numbers)
    return _label(drafts, numbers, pg_filters)


def _in_one_space(
    entries: list[tuple[Group, list[tuple[int, int]]]],
) -> list[tuple[Group, list[tuple[int, int]]]]:
    """The groups of one name, with members by the ranks of the job. A group made by hand, or of another world, counts its ranks
    for itself: where a rank uses it that it does not list, its members are those who use it."""
    users = tuple(sorted({rank for _, uses in entries for rank, _ in uses}))
    sizes = {len(group.ranks) for group, _ in entries}
    foreign = any(group.ranks and rank not in group.ranks for group, uses in entries for rank, _ in uses)
    if not foreign or sizes != {len(users)}:
        return entries
    return [(replace(group, ranks=users), uses) for group, uses in entries]


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
    descs, names = Counter(draft.desc for draft in drafts), Counter(draft.name for draft in drafts)
    described = [_described(draft, descs[draft.desc] == 1) for draft in drafts]
    unique = {label for label, count in Counter(described).items() if label and count == 1}
    views: list[GroupView] = []
    keep = np.full(len(drafts) + 1, -1, np.int32)
    for index, draft in enumerate(drafts):
        label = described[index] if described[index] in unique else draft.name
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
    return _members(draft) + (f" ({draft.backend})" if draft.backend else "")


def _described(draft: _Draft, only_one: bool) -> str:
    """By its description; by its name ("") where several share that and somebody chose the name: torch's are numbers or hashes."""
    if only_one or not draft.desc:
        return draft.desc
    return f"{draft.desc}{_members(draft)}" if re.fullmatch(r"\d*|[0-9a-f]{16,}", draft.name) else ""


def _members(draft: _Draft) -> str:
    """ "[0,2]": a mesh has several groups of one description."""
    shown = ",".join(map(str, (draft.members or ())[:4])) + (",…" if len(draft.members or ()) > 4 else "")
    return f"[{shown}]" if shown else ""


def is_world(group: GroupView) -> bool:
    """Whether this is the group of all ranks."""
    return group.desc == "default_pg" or group.name == "0"


def _world_size(by_rank: dict[int, RankTrace]) -> int:
    """As most ranks say: one may have been given a wrong number. The larger one on a tie; 0 unknown."""
    sizes = Counter(trace.header.world_size or 0 for trace in by_rank.values())
    return max(filter(None, sizes), key=lambda size: (sizes[size], size), default=0)


def expected_ranks(by_rank: dict[int, RankTrace], groups: list[GroupView]) -> frozenset[int]:
    """Ranks that the job must have: group members, world size; holes in the numbering when nothing else tells."""
    expected = set(by_rank)
    for group in groups:
        expected.update(group.members)
    expected.update(range(_world_size(by_rank)))
    worlds = [group for group in groups if is_world(group)]
    if any(not group.members_known for group in worlds) and by_rank:
        expected.update(range(max(by_rank) + 1))
    return frozenset(expected)
