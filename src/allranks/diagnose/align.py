"""RankTrace per rank → Job: groups as the whole job knows them, and one lane of collectives per (group, rank).

Alignment is by per-group sequence number. Record ids are per process and say nothing across ranks. A lane knows
how far its ring reaches back (`first`), how far it got (`last`), and whether its end may have been cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from allranks.diagnose.groups import expected_ranks, is_world, resolve_groups
from allranks.diagnose.job import GroupView, Job, Lane, Now, RankView, Tables
from allranks.diagnose.ops import Family
from allranks.model.trace import Flag, RankTrace, State

#: A sequence number that falls by more than this begins a new life of the group (reset, new quorum).
RESET_DROP = 64


def align(
    traces: Iterable[RankTrace], *, cut: frozenset[int] = frozenset(), now_ns: int = 0,
    pg_filters: frozenset[str] = frozenset(),
) -> Job:  # fmt: skip
    """Builds the Job. `cut` are ranks whose file lost its end; `now_ns` is when live black boxes were read."""
    tables = Tables()
    by_rank = {t.header.rank: t for t in traces if t.header.rank is not None}
    groups, numbers = resolve_groups(by_rank, pg_filters)
    ranks = {}
    for rank in sorted(by_rank):
        ranks[rank] = _view(rank, by_rank[rank], tables, numbers[rank], rank in cut, now_ns)
        _add_lanes(ranks[rank], groups)
    expected = expected_ranks(by_rank, groups)
    groups = [_complete(group, ranks, expected) for group in groups]
    world = max((t.header.world_size or 0 for t in by_rank.values()), default=0) or len(expected) or None
    return Job(ranks, tuple(groups), tables, world, tuple(sorted(expected - set(ranks))), now_ns)


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
_NOT_A_COLLECTIVE = int(Flag.P2P | Flag.COALESCED_PART)
#: Families that are no collective whatever the flags say (torchcomms does not mark them).
_P2P_FAMILY = np.zeros(1 << 15, bool)
_P2P_FAMILY[[int(Family.SEND), int(Family.RECV), int(Family.P2P_BATCH)]] = True


def is_box(trace: RankTrace) -> bool:
    """Whether the trace is a black box, which is read live."""
    return trace.kind.startswith("black box")


def _view(
    rank: int, trace: RankTrace, tables: Tables, numbers: np.ndarray, cut: bool, now_ns: int
) -> RankView:
    calls = trace.calls
    names = tables.number(0, trace.names)[calls["op"]]
    shapes = tables.number(1, trace.shapes)[calls["shapes"]]
    sig = (names << 51) | (shapes << 24) | ((calls["root"].astype(np.int64) + 1 & 0x7FFFF) << 5)
    sig |= calls["reduce_op"].astype(np.int64) & 0x1F
    return RankView(
        rank, trace, call_states(calls), tables.family_codes()[names], sig,
        tables.number(2, trace.stacks).astype(np.int32)[calls["stack"]], numbers[calls["group"]], cut,
        now_ns if is_box(trace) and now_ns else trace.header.written_ns,
    )  # fmt: skip


def _add_lanes(view: RankView, groups: list[GroupView]) -> None:
    """Splits a rank's collectives by group and puts each into its GroupView."""
    calls = view.trace.calls
    collective = (calls["flags"] & _NOT_A_COLLECTIVE) == 0
    mine = np.flatnonzero(collective & ~_P2P_FAMILY[view.family] & (calls["seq"] >= 0) & (view.group >= 0))
    number = view.group[mine]
    order = np.argsort(number, kind="stable")
    mine, number = mine[order], number[order]
    seqs = calls["seq"][mine]
    wrapped = _wrapped(view.trace)
    ends = [*(np.flatnonzero(number[1:] != number[:-1]) + 1).tolist(), len(mine)] if len(mine) else []
    start = 0
    for end in ends:
        rows, own = current_life(mine[start:end], seqs[start:end])
        groups[int(number[start])].lanes[view.rank] = Lane.of(view.rank, rows, own, wrapped, view.cut)
        start = end


def _complete(group: GroupView, ranks: dict[int, RankView], expected: frozenset[int]) -> GroupView:
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


def current_life(rows: np.ndarray, seqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Only the calls since the group last began anew; ascending, the last record of each number kept."""
    if bool((seqs[1:] <= seqs[:-1]).any()):
        steps = np.diff(seqs)
        resets = np.flatnonzero((steps < -RESET_DROP) | ((steps < 0) & (seqs[1:] <= 1)))
        if len(resets):
            rows, seqs = rows[resets[-1] + 1 :], seqs[resets[-1] + 1 :]
        order = np.argsort(seqs, kind="stable")
        rows, seqs = rows[order], seqs[order]
        keep = np.append(np.diff(seqs) > 0, True)
        rows, seqs = rows[keep], seqs[keep]
    return rows, seqs
