"""An Analysis → the tables of torchfrtrace's database. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from allranks.diagnose.job import GroupView, Job
from allranks.frtrace.problems import STATES, Analysis, TraceProblem, lists
from allranks.frtrace.types import Collective, Database, Group, Membership, NCCLCall, Traceback
from allranks.model.torch_dump import profiling_name
from allranks.model.trace import Flag, State


def build_database(analysis: Analysis) -> Database:
    """All groups, collectives and calls. Problems come first among the collectives, the root cause foremost."""
    job = analysis.job
    ids = group_ids(job)
    groups = [Group(ids[view.index], view.desc, len(view.members)) for view in job.groups]
    memberships = [Membership(ids[view.index], rank) for view in job.groups for rank in view.members]
    tracebacks = [Traceback(i, frames_text(job, i)) for i in range(len(job.tables.stacks))]
    collectives: list[Collective] = []
    numbers: dict[tuple[int, int], int] = {}
    for problem in analysis.problems:
        if not problem.bare:
            collectives.append(problem_collective(job, ids, problem, len(collectives)))
            numbers.setdefault((problem.group, problem.seq), len(collectives) - 1)
    for view in job.groups:
        _add_collectives(job, ids, view, collectives, numbers)
    return Database(groups, memberships, tracebacks, collectives, _calls(job, ids, numbers))


def group_ids(job: Job) -> dict[int, str]:
    """A unique id per group: its name, or its label where the name is taken."""
    names = [view.name for view in job.groups]
    return {view.index: view.name if names.count(view.name) == 1 else view.label for view in job.groups}


def problem_collective(job: Job, ids: dict[int, str], problem: TraceProblem, number: int) -> Collective:
    """The collective of a problem, with what is wrong filled in."""
    made = _collective(
        job, ids, job.groups[problem.group], problem.rank, problem.row, number, problem.expected
    )
    group = job.groups[problem.group]
    others = {
        rank: _collective(job, ids, group, rank, group.lanes[rank].row(problem.seq), number, problem.expected)
        for rank, _ in problem.errors
    }
    return made._replace(
        pass_check=False,
        input_numel=problem.totals[0] if problem.totals else None,
        output_numel=problem.totals[1] if problem.totals else None,
        missing_ranks=set(problem.missing) or None,
        mismatch_collectives=others or None,
        type_of_mismatch=problem.errors[0][1] if problem.errors else None,
    )


def _add_collectives(
    job: Job,
    ids: dict[int, str],
    view: GroupView,
    collectives: list[Collective],
    numbers: dict[tuple[int, int], int],
) -> None:
    """One collective per sequence number, described by the lowest rank that has it."""
    for rank in sorted(view.lanes):
        lane = view.lanes[rank]
        for seq, row in zip(lane.seqs.tolist(), lane.rows.tolist(), strict=True):
            key = (view.index, seq)
            if key not in numbers:
                numbers[key] = len(collectives)
                collectives.append(_collective(job, ids, view, rank, row, len(collectives), view.members))


def _collective(
    job: Job,
    ids: dict[int, str],
    view: GroupView,
    rank: int,
    row: int,
    number: int,
    expected: tuple[int, ...],
) -> Collective:
    call = job.ranks[rank].trace.calls[row]
    shapes = job.shapes(rank, row)
    numbers = (int(call["seq"]), int(call["p2p_seq"]), int(call["begin"]) - 1)
    sizes = (lists(shapes.inputs), lists(shapes.outputs))
    state = STATES[State(int(call["state"]))]
    name, stack = call_name(job, rank, row), frames(job, rank, row)
    return Collective(
        number, ids[view.index], True, *numbers, view.desc, name, *sizes, set(expected), state, stack
    )


def _calls(job: Job, ids: dict[int, str], numbers: dict[tuple[int, int], int]) -> list[NCCLCall]:
    made: list[NCCLCall] = []
    for rank, view in job.ranks.items():
        calls = view.trace.calls
        alone = (calls["flags"] & np.uint16(Flag.P2P | Flag.COALESCED_PART)) != 0
        for row in range(len(calls)):
            group = int(view.group[row])
            if group < 0:
                continue
            number = None if alone[row] else numbers.get((group, int(calls["seq"][row])))
            sizes = lists(job.shapes(rank, row).inputs)
            made.append(
                NCCLCall(len(made), number, ids[group], rank, int(view.stack[row]), job.op(rank, row), sizes)
            )
    return made


def call_name(job: Job, rank: int, row: int) -> str:
    """ "nccl:all_reduce" or "nccl:send 0->1", as the dump had it."""
    trace = job.ranks[rank].trace
    call = trace.calls[row]
    group = trace.groups[int(call["group"])]
    op = trace.names[int(call["op"])]
    if op in ("send", "recv"):
        return profiling_name(group, op, rank, int(call["peer"]))
    return f"{group.backend}:{op}" if group.backend else op


def frames(job: Job, rank: int, row: int) -> list[dict[str, Any]]:
    """A call's stack as torch's dictionaries."""
    return [{"name": f.name, "filename": f.file, "line": f.line} for f in job.frames(rank, row)]


def frames_text(job: Job, stack: int) -> str:
    """A stack, one frame per line."""
    return "\n".join(f"{f.name} at {f.file}:{f.line}" for f in job.tables.stacks[stack])
