"""A recorded hang as a small program: what each process of a replay does, in order. Pure; `replay_script.py` writes it down.

A rank's calls are posted in the order of its record. A call is waited for before the first later call that the rank made after its end:
it had ended, or all had entered it, without that later call, so waiting there cannot block what did not block before. Calls that never ended are waited
for last. A rank that came to no further call sleeps, ends or dies there, as it did.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from allranks.diagnosis.context import user_frames
from allranks.diagnosis.job import EVEN_ONLY, Family, GroupView, Job, Now, RankCalls, is_p2p
from allranks.model.diagnosis import Finding
from allranks.model.trace import REDUCE_OPS, Flag, Frame

#: Calls of each rank that are repeated, the newest; processes, unless the caller allows more, and at most.
MAX_CALLS, PROCESSES, MAX_PROCESSES = 600, 16, 64
#: Elements up to which a tensor keeps its size.
WHOLE = 1 << 14
#: Other members that are kept of each group of a guilty rank.
BESIDE = 3

_OPS = {
    Family.ALL_REDUCE: "all_reduce",
    Family.BROADCAST: "broadcast",
    Family.REDUCE: "reduce",
    Family.ALL_GATHER: "all_gather",
    Family.REDUCE_SCATTER: "reduce_scatter",
    Family.ALL_TO_ALL: "all_to_all_single",
    Family.GATHER: "gather",
    Family.SCATTER: "scatter",
    Family.BARRIER: "barrier",
    Family.MONITORED_BARRIER: "monitored_barrier",
    Family.SPARSE: "all_reduce",
    Family.SEND: "isend",
    Family.RECV: "irecv",
}
_EVEN = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}


@dataclass(frozen=True)
class PostCall:
    """One call. Sizes are elements of each tensor; the partner is a process: root or peer, -1 none."""

    op: str  # a function of torch.distributed
    group: int
    path: tuple[Frame, ...]  # the user's lines, innermost first
    given: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    dtype: str = "Float"
    partner: int = -1
    more: tuple[int | str, ...] = ()  # reduce operation, tag, or (output splits, input splits)
    number: int = -1  # of the record
    waits: bool = False  # until it has ended


@dataclass(frozen=True)
class Await:
    """For the call that was posted as the so-manyth, from 0."""

    post: int


@dataclass(frozen=True)
class MarkStep:
    step: int


@dataclass(frozen=True)
class DestroyGroup:
    group: int


@dataclass(frozen=True)
class EndProcess:
    """What the process does last: "wait" for what has not ended, "sleep", "exit", "kill", "raise" or a function of SETUP_CALLS."""

    how: str
    text: str = ""


Action = PostCall | Await | MarkStep | DestroyGroup | EndProcess


@dataclass(frozen=True)
class ReplayPlan:
    """`ranks[i]` is the rank that process i stands for; group 0 is all processes."""

    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[Action, ...], ...]
    unrecorded: tuple[int, ...] = ()  # processes whose rank left no file
    verdict: Finding | None = None

    @property
    def guilty(self) -> tuple[int, ...]:
        """The processes that stand for the ranks of the verdict."""
        named = self.verdict.ranks if self.verdict is not None else ()
        return tuple(sorted(self.ranks.index(rank) for rank in named if rank in self.ranks))


def plan_replay(
    job: Job, verdict: Finding | None, gone: Collection[int] = (), processes: int = PROCESSES
) -> ReplayPlan:
    """What each process does. `gone` are ranks whose process was seen to have ended without shutting down."""
    ranks = choose_ranks(job, verdict, min(processes, MAX_PROCESSES))
    number = {rank: index for index, rank in enumerate(ranks)}
    shared, groups = {}, [tuple(range(len(ranks)))]
    for group in job.groups:
        members = tuple(number[rank] for rank in group.order or group.members if rank in number)
        if group.is_world:
            shared[group.index] = 0
        elif len(members) > 1:
            shared[group.index] = len(groups)
            groups.append(members)
    writer = _Writer(job, number, shared, tuple(groups), _starts(job, ranks), _scale(job, ranks))
    died = {*gone, *(verdict.ranks if verdict is not None and verdict.cause == "rank_died" else ())}
    programs = tuple(writer.program(rank, rank in died, rank in gone) for rank in ranks)
    unrecorded = tuple(number[rank] for rank in ranks if rank not in job.ranks)
    return ReplayPlan(ranks, tuple(groups), programs, unrecorded, verdict)


def choose_ranks(job: Job, verdict: Finding | None, limit: int) -> tuple[int, ...]:
    """All ranks, or those that matter: the guilty, and some members of each of their groups and partners, those that wait first."""
    every = sorted({*job.ranks, *job.missing_ranks})
    if len(every) <= limit:
        return tuple(every)
    guilty = [rank for rank in (verdict.ranks if verdict is not None else ()) if rank in every][: limit // 2]
    chosen = dict.fromkeys(guilty or every[:1])
    waiting = set(verdict.waiting) if verdict is not None else set()
    named = verdict.group if verdict is not None else ""
    groups = [group for group in job.groups if set(group.members) & chosen.keys()]
    for group in sorted(groups, key=lambda group: (group.label != named, len(group.members))):
        others = [rank for rank in group.members if rank not in guilty]
        for rank in sorted(others, key=lambda rank: (rank not in waiting, rank not in chosen, rank))[:BESIDE]:
            chosen.setdefault(rank)
    for rank in list(chosen):
        calls = job.ranks[rank].trace.calls if rank in job.ranks else None
        partners = np.unique(calls["peer"][-MAX_CALLS:]).tolist() if calls is not None else []
        chosen.update(dict.fromkeys(peer for peer in partners if peer in every))
    return tuple(sorted(list(chosen)[:limit]))


def _starts(job: Job, ranks: tuple[int, ...]) -> dict[int, int]:
    """The first row of each rank that is repeated: all calls, or those behind one that all ranks have finished."""
    views = {rank: job.ranks[rank] for rank in ranks if rank in job.ranks}
    whole = all(not len(v.trace.calls) or int(v.trace.calls["begin"][0]) == 1 for v in views.values())
    if whole and all(len(view.trace.calls) <= MAX_CALLS for view in views.values()):
        return dict.fromkeys(views, 0)
    groups = sorted(job.groups, key=lambda group: (-len(group.lanes.keys() & views.keys()), group.index))
    starts = _behind_anchor(groups[0], views) if groups else {}
    begin_ns = min(
        (int(views[r].trace.calls["created_ns"][s]) for r, s in starts.items() if s < len(views[r].now)),
        default=0,
    )
    for rank, view in views.items():
        later = int(np.count_nonzero(view.trace.calls["created_ns"] < begin_ns))
        starts.setdefault(rank, max(later, len(view.now) - MAX_CALLS))
    return starts


def _behind_anchor(group: GroupView, views: dict[int, RankCalls]) -> dict[int, int]:
    """The rows behind a call of the group that all of its ranks know and that leaves none of them too many."""
    lanes = [lane for rank, lane in group.lanes.items() if rank in views and len(lane.seqs)]
    low, high = max((lane.first for lane in lanes), default=0), min((lane.last for lane in lanes), default=-1)
    for seq in range(low, high + 1):
        rows = {lane.rank: lane.row(seq) for lane in lanes}
        if min(rows.values()) >= 0 and all(len(views[r].now) - row <= MAX_CALLS for r, row in rows.items()):
            return {rank: row + 1 for rank, row in rows.items()}
    return {}


def _scale(job: Job, ranks: tuple[int, ...]) -> dict[int, int]:
    """Large numbers of elements → small ones; different ones stay different, and in order."""
    tables = {
        id(job.ranks[rank].trace.shapes): job.ranks[rank].trace.shapes for rank in ranks if rank in job.ranks
    }
    every = {s for table in tables.values() for shapes in table for s in (*shapes.inputs, *shapes.outputs)}
    large = sorted({_elements(size) for size in every if _elements(size) > WHOLE})
    return {size: WHOLE + 1 + index for index, size in enumerate(large)}


def _elements(size: tuple[int, ...]) -> int:
    """Of a tensor; hostile files hold negative and endless ones."""
    found = 1
    for extent in size:
        found *= max(0, extent)
    return found


@dataclass(frozen=True)
class _Writer:
    """Writes the programs of ranks."""

    job: Job
    number: dict[int, int]  # rank → process
    shared: dict[int, int]  # group of the job → group of the replay
    groups: tuple[tuple[int, ...], ...]
    starts: dict[int, int]
    scale: dict[int, int]
    # user's lines → stacks, numbered
    ways: dict[tuple[Frame, ...], dict[int, int]] = field(default_factory=dict)

    def program(self, rank: int, died: bool, gone: bool) -> tuple[Action, ...]:
        view = self.job.ranks.get(rank)
        if view is None:
            return (*self._of_others(rank), EndProcess("kill" if died else "sleep"))
        return (*self._actions(view), self._end(view, died, gone))

    def _rows(self, view: RankCalls) -> list[int]:
        """The rows that are repeated: of groups of the replay, and not the entries that stand for a batch."""
        found = []
        low = {index: self._low(self.job.groups[index]) for index in self.shared}
        flags, seqs = view.trace.calls["flags"], view.trace.calls["seq"]
        for row in range(self.starts[view.rank], len(view.now)):
            group, family = int(view.group[row]), int(view.family[row])
            if group not in self.shared or family not in _OPS:
                continue
            stands_for_batch = int(flags[row]) & Flag.COALESCED_END and len(view.trace.parts(row))
            if stands_for_batch or (not is_p2p(np.array([family]))[0] and int(seqs[row]) < low[group]):
                continue
            found.append(row)
        return found

    def _low(self, group: GroupView) -> int:
        """The first number that all ranks repeat."""
        firsts: list[int] = []
        for rank, start in self.starts.items():
            lane = group.lanes.get(rank)
            kept = lane.seqs[lane.rows >= start].tolist() if lane is not None else []
            firsts += kept[:1]
        return max(firsts, default=0) if any(self.starts.values()) else 0

    def _actions(self, view: RankCalls) -> Iterator[Action]:
        calls, rows = view.trace.calls, self._rows(view)
        pending: dict[int, int] = {}  # post → when it ended
        destroyed = sorted((ns, index) for index, ns in view.trace.destroyed.items())
        step = -1
        for at, row in enumerate(rows):
            now_ns = int(calls["created_ns"][row])
            while destroyed and destroyed[0][0] <= now_ns:
                yield from self._destroy(view, destroyed.pop(0)[1])
            message = bool(is_p2p(view.family[row : row + 1])[0])
            ended = [post for post, ns in pending.items() if ns <= now_ns and not (ns < 0 and message)]
            yield from (Await(post) for post in ended)
            pending = {post: ns for post, ns in pending.items() if post not in ended}
            if (now_step := int(calls["step"][row])) > step:
                step = now_step
                yield MarkStep(step)
            end_ns = self._end_ns(view, row)
            after = rows[at + 1] if at + 1 < len(rows) else -1
            last = after < 0 and not np.any(view.now[row] == Now.OPEN)
            soon = 0 <= end_ns <= int(calls["created_ns"][after]) if after >= 0 else last and end_ns >= 0
            yield replace(self._post(view, row), waits=soon)
            if not soon and end_ns is not None:
                pending[at] = end_ns
        yield from (Await(post) for post, ns in pending.items() if ns < NEVER)
        for _, index in destroyed:
            yield from self._destroy(view, index)
        if (now_step := view.trace.progress.step) > step >= 0:
            yield MarkStep(now_step)

    def _destroy(self, view: RankCalls, index: int) -> Iterator[DestroyGroup]:
        name = view.trace.groups[index].name
        found = [self.shared[g.index] for g in self.job.groups if g.name == name and g.index in self.shared]
        yield from (DestroyGroup(group) for group in found[:1])

    def _end_ns(self, view: RankCalls, row: int) -> int:
        """When the call ended; NEVER; 0: before the next one; -1: before the next collective."""
        state = view.now[row]
        if state == Now.OPEN:
            return NEVER
        ended = int(view.trace.calls["completed_ns"][row])
        if ended:
            return min(ended, self._entered_ns(view, row))
        return -1 if is_p2p(view.family[row : row + 1])[0] else 0

    def _entered_ns(self, view: RankCalls, row: int) -> int:
        """When the last member entered a collective: its end, which may be noticed late, needs no later call. NEVER: unknown."""
        group, seq = self.job.groups[int(view.group[row])], int(view.trace.calls["seq"][row])
        rows = {rank: lane.row(seq) for rank, lane in group.lanes.items()}
        message = is_p2p(view.family[row : row + 1])[0]
        if message or rows.get(view.rank) != row or min(rows.values()) < 0 or len(rows) < len(group.members):
            return NEVER
        return max(int(self.job.ranks[rank].trace.calls["created_ns"][at]) for rank, at in rows.items())

    def _of_others(self, rank: int) -> Iterator[Action]:
        """The program of a rank without a file: what others have finished with it."""
        sharing = [
            (sum(rank in g.members and other in g.lanes for g in self.job.groups), -other)
            for other in self.number
            if other in self.job.ranks
        ]
        if not sharing:
            return
        view = self.job.ranks[-max(sharing)[1]]
        for row in self._rows(view):
            group = self.job.groups[int(view.group[row])]
            done = view.now[row] == Now.DONE and not is_p2p(view.family[row : row + 1])[0]
            if done and rank in group.members:
                yield replace(self._post(view, row), waits=True)

    def _end(self, view: RankCalls, died: bool, gone: bool) -> EndProcess:
        closed, inside = view.trace.progress.closed, view.trace.progress.inside
        rows = [row for row in range(self.starts[view.rank], len(view.now)) if view.now[row] == Now.OPEN]
        if closed == "exit":
            return EndProcess("exit")
        if closed:
            return EndProcess("raise", re.sub(r"^exception: \w+ \([^)]*\)(?:: |$)", "", closed)[:600])
        if died and (gone or not rows):
            return EndProcess("kill")
        if inside in ("init_process_group", "new_group"):
            return EndProcess(inside)
        return EndProcess("wait") if rows else EndProcess("sleep")

    # ---- one call

    def _post(self, view: RankCalls, row: int) -> PostCall:
        call, shapes = view.trace.calls[row], self.job.shapes(view.rank, row)
        group = self.shared[int(view.group[row])]
        name, op = self.job.op(view.rank, row), _OPS[Family(int(view.family[row]))]
        given, taken = (
            tuple(self._small(_elements(s)) for s in side) for side in (shapes.inputs, shapes.outputs)
        )
        given = given or self._counted(int(call["in_numel"]))
        taken = taken or self._counted(int(call["out_numel"]))
        dtypes = shapes.input_dtypes or shapes.output_dtypes
        path = self._path(view, row)
        post = PostCall(
            op,
            group,
            path,
            given,
            taken,
            dtypes[0] if dtypes else "Float",
            number=int(call["seq"]),
        )
        return _FIT.get(op, _fit_nothing)(self, replace(post, op=self._variant(op, name, post)), view, row)

    def _path(self, view: RankCalls, row: int) -> tuple[Frame, ...]:
        """The user's lines of a call; ways through torch that differ behind the same lines have another outermost frame."""
        number = int(view.stack[row])
        lines = user_frames(self.job.frames(view.rank, row))
        ways = self.ways.setdefault(lines, {})
        way = ways.setdefault(number, len(ways))
        return (*lines, Frame(f"torch_{way}", "torch", way)) if way else lines

    def _variant(self, op: str, name: str, post: PostCall) -> str:
        """The form of an operation that takes these tensors."""
        if op in _EVEN and (name in EVEN_ONLY or len(post.given) == len(post.taken) == 1):
            return _EVEN[op]
        return "all_reduce_coalesced" if op == "all_reduce" and len(post.given) > 1 else op

    def _small(self, elements: int) -> int:
        return self.scale.get(elements, elements)

    def _counted(self, elements: int) -> tuple[int, ...]:
        return (self._small(elements),) if elements >= 0 else (1,)

    def process_of(self, rank: int, group: int) -> int:
        """The process of a root or peer; of one that is not in the replay, the first of the group."""
        return self.number.get(rank, self.groups[group][0])


NEVER = 1 << 62


def _fit_nothing(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    return post


def _reduction(view: RankCalls, row: int) -> str:
    code = int(view.trace.calls["reduce_op"][row])
    return REDUCE_OPS[code] if 0 < code < len(REDUCE_OPS) else "sum"


def _fit_reduction(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    root = int(view.trace.calls["root"][row])
    partner = writer.process_of(root, post.group) if post.op == "reduce" else -1
    post = replace(post, partner=partner, more=(_reduction(view, row),))
    return _fit_spread(writer, post, view, row) if post.op.startswith("reduce_scatter") else post


def _fit_root(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    root = writer.process_of(int(view.trace.calls["root"][row]), post.group)
    size, mine = len(writer.groups[post.group]), writer.number[view.rank] == root
    given, taken = post.given, post.taken
    if post.op == "gather":
        taken = _resized(taken or given[:1], size) if mine else ()
    if post.op == "scatter":
        given = _resized(given or taken[:1], size) if mine else ()
    return replace(post, partner=root, given=given, taken=taken)


def _fit_spread(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    """all_gather and reduce_scatter: every rank's part, and the whole, of a group that may have lost members."""
    size, before = len(writer.groups[post.group]), len(writer.job.groups[int(view.group[row])].members)
    gathers = post.op.startswith("all_gather")
    part, whole = (post.given, post.taken) if gathers else (post.taken, post.given)
    if post.op in _EVEN.values():
        shapes = writer.job.shapes(view.rank, row)
        sides = shapes.inputs, shapes.outputs
        whole_before, part_before = (
            sum(map(_elements, side)) for side in (sides[::-1] if gathers else sides)
        )
        whole = (part[0] * size,) if whole_before == part_before * before else whole
    else:
        whole = _resized(whole or part, size)
    return replace(post, given=part if gathers else whole, taken=whole if gathers else part)


def _fit_exchange(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    group, shapes = writer.job.groups[int(view.group[row])], writer.job.shapes(view.rank, row)
    order = group.order or group.members
    gives = _parts(shapes.inputs, shapes.input_splits, len(order))
    takes = _parts(shapes.outputs, shapes.output_splits, len(order))
    kept = [index for index, rank in enumerate(order) if rank in writer.number]
    gives, takes = (tuple(writer._small(side[index]) for index in kept) for side in (gives, takes))
    return replace(post, given=(sum(gives),), taken=(sum(takes),), more=(*takes, *gives))


def _parts(tensors: tuple[tuple[int, ...], ...], splits: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Elements for each member."""
    if len(tensors) == size > 1:
        return tuple(map(_elements, tensors))
    whole = sum(map(_elements, tensors))
    if len(splits) == size and sum(splits) > 0:
        return tuple(max(0, split) * whole // sum(splits) for split in splits)
    return (whole // size,) * size


def _fit_message(writer: _Writer, post: PostCall, view: RankCalls, row: int) -> PostCall:
    call = view.trace.calls[row]
    peer = writer.number.get(int(call["peer"]), -1) if int(call["peer"]) >= 0 else -1
    sizes = post.given if post.op == "isend" else post.taken
    sizes = sizes or post.given or post.taken or (1,)
    return replace(post, partner=peer, given=sizes, taken=sizes, more=(max(0, int(call["tag"])),))


def _resized(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """One size for each member, also where one tensor stands for all."""
    return (
        sizes[:size] if len(sizes) >= size else (*sizes, *[sizes[-1] if sizes else 1] * (size - len(sizes)))
    )


_FIT = {
    "all_reduce": _fit_reduction,
    "all_reduce_coalesced": _fit_reduction,
    "reduce": _fit_reduction,
    "reduce_scatter": _fit_reduction,
    "broadcast": _fit_root,
    "gather": _fit_root,
    "scatter": _fit_root,
    "all_gather": _fit_spread,
    "all_to_all_single": _fit_exchange,
    "isend": _fit_message,
    "irecv": _fit_message,
}
