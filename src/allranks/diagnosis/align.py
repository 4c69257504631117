"""RankTrace per rank → Job: groups as the whole job knows them, one lane of collectives per (group, rank), states that can be. Pure.

Alignment is by per-group sequence number. Record ids are per process and say nothing across ranks. A lane knows
how far its ring reaches back (`first`), how far it got (`last`), and whether its end may have been cut off.

Two ranks mean the same group when name, library and members agree. Where a rank does not know the members (gloo's
own recorder, once there are subgroups) it joins the group of that name that lists it, if there is exactly one.
Groups of replicas that come and go are made anew with every quorum: what failed in an earlier one is history.

States of NCCL's own recorder that cannot be are set right. It marks a coalesced collective as completed although a member never
entered it. Two things look alike in the dumps: a rank that never came while the others are in the call, and a rank whose dump was
merely taken earlier. What separates them is the late rank's own clock: when its file holds a time later than the others' completion, it
had still not entered when the call was said to be over, and the completion is false. Without such a time nothing is certain; it is
worth a word only where all the others are in that very call.

torch takes the CUDA events of synchronous calls again for later ones: as long as a later call is pending, all that had its event
before read "scheduled". So a collective that has ended on one rank has been reached by all, and a rank of which nothing is said
to have ended tells nothing but the order of its calls.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.diagnosis.job import (
    GroupView,
    Job,
    JobTables,
    Lane,
    Now,
    Program,
    Programs,
    RankCalls,
    is_synchronising,
)
from allranks.diagnosis.p2p import CLOCKS_NS, newest_ns
from allranks.diagnosis.waits import is_too_old, lowest_end
from allranks.model.trace import Flag, Group, RankTrace, State

VAGUE = ("", "undefined")  # descriptions that say nothing
#: Of a rank with fewer calls none need have ended.
MIN_UNTOLD = 3
_QUORUM = re.compile(r"^(replicas|votes)/(\d+)(/\d+)?$")


def forget_past_quorums(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without calls of groups of replicas that a later quorum has replaced: who was lost left them unfinished there,
    and the others continued in the next group."""
    newest = max((_quorum(name) for name in {g.name for t in traces for g in t.groups}), default=-1)
    if newest < 0:
        return list(traces)
    return [_with_groups(trace, lambda name: not 0 <= _quorum(name) < newest) for trace in traces]


def without_replica_groups(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without calls of groups of replicas: the ranks of one replica are in different ones of the same name."""
    return [_with_groups(trace, lambda name: _quorum(name) < 0) for trace in traces]


def only_replica_groups(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces with the calls of the newest groups of replicas only."""
    return [_with_groups(t, lambda name: name.startswith("replicas/")) for t in forget_past_quorums(traces)]


def _with_groups(trace: RankTrace, wanted: Callable[[str], bool]) -> RankTrace:
    others = [index for index, group in enumerate(trace.groups) if not wanted(group.name)]
    if not others or not len(trace.calls):
        return trace
    return replace(trace, calls=trace.calls[~np.isin(trace.calls["group"], others)])


def _quorum(name: str) -> int:
    """The quorum of a group's name; -1 for groups of any other kind."""
    found = _QUORUM.match(name)
    return int(found[2]) if found else -1


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
    placed = {}
    for rank in sorted(by_rank):
        calls = by_rank[rank].calls
        placed[rank] = programs.place(by_rank[rank]), _STATES[calls["state"] | (calls["flags"] << 3)]
    ranks = {}
    for rank, (program, states) in placed.items():
        seen_ns = _seen_ns(by_rank[rank], now_ns)
        ranks[rank] = _view(by_rank[rank], program, numbers[rank], states, rank in cut, seen_ns)
        _add_lanes(ranks[rank], program, numbers[rank], groups)
    expected = expected_ranks(by_rank, groups)
    groups = [_complete(group, ranks, expected) for group in groups]
    world = _world_size(by_rank) or len(expected) or None
    return Job(ranks, tuple(groups), tables, world, tuple(sorted(expected - set(ranks))), now_ns, ended)


def _state_table() -> np.ndarray:
    """Now by state | flags << 3: one look for each call, because there may be 32 million."""
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
    if trace.is_box and (now_ns or not trace.progress.closed):
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
        members = tuple(sorted(expected if group.is_world else group.lanes))
        group = replace(group, members=members, order=members)
    empty = np.zeros(0, np.int64)
    for rank in members:
        view = ranks.get(rank)
        if view is not None and rank not in group.lanes:
            group.lanes[rank] = Lane.of(rank, empty, empty, _wrapped(view.trace), view.cut)
    return replace(group, lanes=dict(sorted(group.lanes.items())))


def _wrapped(trace: RankTrace) -> bool:
    return trace.header.dropped > 0 or (len(trace.calls) > 0 and int(trace.calls["begin"][0]) > 1)


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
            library = f" ({draft.backend})" if draft.backend else ""  # tells groups of equal name apart
            label = f"{draft.name or 'unnamed'}{_members(draft)}{library}"
        if pg_filters and not pg_filters & {draft.name, draft.desc, label}:
            continue
        keep[index] = len(views)
        known = draft.members is not None
        named = (draft.name, draft.desc, draft.backend, label or "unnamed")
        views.append(GroupView(len(views), *named, draft.members or (), known, draft.order))
    return views, {rank: keep[own] for rank, own in numbers.items()}


def _described(draft: _Draft, only_one: bool) -> str:
    """By its description; by its name ("") where several share that and somebody chose the name: torch's are numbers or hashes."""
    if only_one or not draft.desc:
        return draft.desc
    return f"{draft.desc}{_members(draft)}" if re.fullmatch(r"\d*|[0-9a-f]{16,}", draft.name) else ""


def _members(draft: _Draft) -> str:
    """ "[0,2]": a mesh has several groups of one description."""
    shown = ",".join(map(str, (draft.members or ())[:4])) + (",…" if len(draft.members or ()) > 4 else "")
    return f"[{shown}]" if shown else ""


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
    worlds = [group for group in groups if group.is_world]
    if any(not group.members_known for group in worlds or groups) and by_rank:
        expected.update(range(max(by_rank) + 1))
    return frozenset(expected)


@dataclass(frozen=True)
class Doubt:
    """A coalesced collective said to be over on `rows`, which the `late` ranks never entered."""

    group: int
    seq: int
    rows: dict[int, int]  # rank → row
    late: tuple[int, ...]
    proven: bool


def settle_states(job: Job) -> tuple[Job, list[Doubt]]:
    """The job with states that can be; and at most one doubt per group, about the first collective that somebody lacks."""
    job = _reopen_unseen(_finish_known(job))
    doubts = [doubt for group in job.groups if (doubt := _doubt(job, group)) is not None]
    return _reopen(job, doubts), doubts


def _finish_known(job: Job) -> Job:
    """The job with the calls of NCCL's dumps taken for finished that must be, whatever their state says."""
    changed = {}
    for rank, view in job.ranks.items():
        if not view.trace.is_box and len(view.now) >= MIN_UNTOLD and _is_untold(job, view):
            changed[rank] = view.now.copy()
            changed[rank][:-1] = np.where(view.now[:-1] == Now.OPEN, Now.LEFT, view.now[:-1])
    there = {rank for rank, view in job.ranks.items() if not view.cut}
    whole = [g for g in job.groups if g.backend.startswith("nccl") and there.issuperset(g.members)]
    lacked = any(lowest_end(group) < group.last for group in whole)
    for group in whole:
        _finish_reached(job, group, changed)
        if lacked:
            _finish_shared(job, group, changed)
    return replace(job, ranks={r: replace(v, now=changed.get(r, v.now)) for r, v in job.ranks.items()})


def _is_untold(job: Job, view: RankCalls) -> bool:
    """Whether not one call of a rank, all of them NCCL's, is said to have ended."""
    if bool(((view.now != Now.OPEN) & (view.now != Now.UNKNOWN)).any()):
        return False
    return all(
        number >= 0 and job.groups[number].backend.startswith("nccl") for number in set(view.group.tolist())
    )


def _finish_reached(job: Job, group: GroupView, changed: dict[int, np.ndarray]) -> None:
    """Calls before one that ended on some rank have ended on all: nobody can be inside it without them."""
    lanes = [
        lane for lane in group.lanes.values() if len(lane.rows) and not job.ranks[lane.rank].trace.is_box
    ]
    hook = [lane for lane in lanes if job.ranks[lane.rank].trace.is_hook]  # it looks once a second
    behind = hook or [lane for lane in lanes if job.ranks[lane.rank].now[lane.rows[0]] == Now.OPEN]
    if not behind or (len(behind) == len(lanes) and not hook):
        return
    reached = max((_last_ended(job.ranks[lane.rank], lane) for lane in lanes), default=-1)
    for lane in behind:
        now = changed.setdefault(lane.rank, job.ranks[lane.rank].now.copy())
        rows = lane.rows[lane.seqs <= min(reached, lane.last - 1)]
        if hook:  # on the root of a call they may disagree
            rooted = ~is_synchronising(job.ranks[lane.rank].family[rows]) & (now[rows] == Now.OPEN)
            rows = rows[: int(np.argmax(rooted))] if rooted.any() else rows
        now[rows[(now[rows] == Now.OPEN) | (now[rows] == Now.LEFT)]] = Now.DONE


def _finish_shared(job: Job, group: GroupView, changed: dict[int, np.ndarray]) -> None:
    """Calls that all members have entered, where somebody lacks in another: that one holds them up, or the state is old.
    Not of calls with a root, on which ranks may disagree, nor of calls that differ, nor of ranks that have ended."""
    floor, found, made = lowest_end(group), [], dict[int, object]()
    for lane in group.lanes.values():
        view = job.ranks[lane.rank]
        now = changed.get(lane.rank, view.now)
        rows = lane.rows[lane.seqs <= floor]
        rows = rows[now[rows] == Now.OPEN]
        if not len(rows) and not view.trace.is_hook:
            return  # it has left what another is still in
        if view.trace.progress.closed or not is_synchronising(view.family[rows]).all():
            return
        found.append((lane.rank, rows))
        for row in rows.tolist():
            call = view.trace.calls[row]
            kind = (view.family[row], view.trace.shapes[call["shapes"]], call["reduce_op"])
            if made.setdefault(int(call["seq"]), kind) != kind:
                return
    for rank, rows in found:
        changed.setdefault(rank, job.ranks[rank].now.copy())[rows] = Now.UNKNOWN


def _last_ended(view: RankCalls, lane: Lane) -> int:
    """The last collective of a lane that has ended and that nobody can end alone; -1 when there is none."""
    rows = lane.rows[(view.now[lane.rows] == Now.DONE) & is_synchronising(view.family[lane.rows])]
    rows = rows[~_is_coalesced(view, rows)] if len(rows) else rows
    return int(view.trace.calls["seq"][rows[-1]]) if len(rows) else -1


def _reopen_unseen(job: Job) -> Job:
    """The job with collectives open that somebody has not entered and that were put away when they were issued."""
    changed: dict[int, np.ndarray] = {}
    for group in job.groups:
        floor = lowest_end(group) if all(rank in job.ranks for rank in group.members) else group.last
        for lane in group.lanes.values() if floor < group.last else ():
            view = job.ranks[lane.rank]
            rows = lane.rows[lane.seqs > floor]
            rows = rows[(view.trace.calls["flags"][rows] & Flag.ENDED_UNSEEN) != 0]
            rows = rows[is_synchronising(view.family[rows])]
            if len(rows):
                changed.setdefault(lane.rank, view.now.copy())[rows] = Now.OPEN
    return replace(job, ranks={r: replace(v, now=changed.get(r, v.now)) for r, v in job.ranks.items()})


def _reopen(job: Job, doubts: Iterable[Doubt]) -> Job:
    """The job with every false completion, and those behind it, taken for unfinished."""
    ranks = dict(job.ranks)
    for doubt in doubts:
        for rank in doubt.rows if doubt.proven else ():
            lane = job.groups[doubt.group].lanes[rank]
            rows = lane.rows[lane.seqs >= doubt.seq]
            now = ranks[rank].now.copy()
            now[rows[now[rows] == Now.DONE]] = Now.OPEN
            ranks[rank] = replace(ranks[rank], now=now)
    return replace(job, ranks=ranks)


def _doubt(job: Job, group: GroupView) -> Doubt | None:
    """About the first call behind what all have entered, if it is said to be over wherever it was made."""
    if not group.backend.startswith("nccl") or not all(rank in job.ranks for rank in group.members):
        return None
    whole = [lane for lane in group.lanes.values() if not lane.cut and not job.ranks[lane.rank].trace.is_box]
    lanes = [lane for lane in whole if len(lane.seqs) or not lane.wrapped]  # those that show their end
    floor = min((lane.last for lane in lanes), default=group.last)
    ahead = [lane for lane in group.lanes.values() if lane.last > floor]
    if not ahead or not all(_only_coalesced_ended(job.ranks[lane.rank], lane, floor) for lane in ahead):
        return None
    late = tuple(lane.rank for lane in lanes if lane.last == floor)
    seq = min(int(lane.seqs[lane.seqs > floor][0]) for lane in ahead)
    rows = {lane.rank: row for lane in ahead if (row := lane.row(seq)) >= 0}
    ends = [_ended_ns(job.ranks[rank], row) for rank, row in rows.items()]
    if not ends or min(ends) < 0:
        return None
    over_ns = min(filter(None, ends), default=0)
    # by their own clocks they had not entered when the call was said to be over
    proven = tuple(r for r in late if over_ns and newest_ns(job.ranks[r]) >= over_ns + CLOCKS_NS)
    return Doubt(group.index, seq, rows, proven, True) if proven else _unproven(job, group, seq, rows, late)


def _unproven(
    job: Job, group: GroupView, seq: int, rows: dict[int, int], late: tuple[int, ...]
) -> Doubt | None:
    """Worth a word only where all the others are in that very call, having issued nothing behind it in any group, and few are late."""
    entered = min(int(job.ranks[rank].trace.calls["created_ns"][row]) for rank, row in rows.items())
    suspects = tuple(rank for rank in late if not is_too_old(job, rank, entered))
    views = [job.ranks[rank] for rank in rows]
    inside = all((int(v.group[-1]), int(v.trace.calls["seq"][-1])) == (group.index, seq) for v in views)
    few = 0 < len(suspects) * 2 <= len(group.members)
    return Doubt(group.index, seq, rows, suspects, False) if inside and few else None


def _is_coalesced(view: RankCalls, rows: np.ndarray) -> np.ndarray:
    """Per row: whether the call stands for a coalesced group."""
    calls = view.trace.calls[rows]
    by_name = np.array([view.trace.names[op].endswith("coalesced") for op in calls["op"].tolist()], bool)
    coalesced: np.ndarray = by_name | ((calls["flags"] & Flag.COALESCED_END) != 0)
    return coalesced


def _only_coalesced_ended(view: RankCalls, lane: Lane, floor: int) -> bool:
    """Whether no ordinary collective behind `floor` is done: one that is proves that everybody went on."""
    rows = lane.rows[lane.seqs > floor]
    done = view.now[rows] == Now.DONE
    ordinary = done & ~_is_coalesced(view, rows) & is_synchronising(view.family[rows])
    return not bool(ordinary.any())


def _ended_ns(view: RankCalls, row: int) -> int:
    """When a coalesced call was said to be over; 0 unknown, -1 when it is open or no such call."""
    if view.now[row] != Now.DONE or not bool(_is_coalesced(view, np.array([row]))[0]):
        return -1
    return int(view.trace.calls["completed_ns"][row])
