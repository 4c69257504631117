"""RankTrace per rank → Job: groups as the whole job knows them, and one lane of collectives per (group, rank).

Alignment is by per-group sequence number. Record ids are per process and say nothing across ranks. A lane knows
how far its ring reaches back (`first`), how far it got (`last`), and whether its end may have been cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from allranks.diagnose.groups import expected_ranks, is_world, resolve_groups
from allranks.diagnose.job import GroupView, Job, JobTables, Lane, Now, RankCalls
from allranks.diagnose.program import Program, Programs
from allranks.model.trace import Flag, RankTrace, State


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
    world = max((t.header.world_size or 0 for t in by_rank.values()), default=0) or len(expected) or None
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
    doubtful = (flags & int(Flag.COMPLETION_UNRELIABLE)) != 0
    now = np.where(state == int(State.COMPLETED), np.where(doubtful, int(Now.LEFT), int(Now.DONE)), now)
    now[(state == int(State.FAILED)) | (state == int(State.TIMED_OUT))] = int(Now.FAILED)
    now[(flags & int(Flag.COALESCED_PART | Flag.CAPTURED)) != 0] = int(Now.UNKNOWN)
    return now.astype(np.int8)


_STATES = _state_table()


def is_box(trace: RankTrace) -> bool:
    """Whether the trace is a black box, which is read live."""
    return trace.kind.startswith("black box")


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
