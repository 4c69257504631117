"""An Analysis → the tables of torchfrtrace's database, and its output line by line: blocks, all entries, tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from allranks.diagnose.job import GroupView, Job
from allranks.errors import InputError
from allranks.frtrace.events import STATES, Analysis, TraceProblem, lists
from allranks.frtrace.types import Collective, Database, Group, Membership, NCCLCall, Traceback
from allranks.model.torch_dump import profiling_name
from allranks.model.trace import Flag, Frame, RankTrace, State


def build_database(analysis: Analysis) -> Database:
    """All groups, collectives and calls. Problems come first among the collectives, the root cause foremost."""
    job = analysis.job
    ids = group_ids(job)
    groups = [Group(ids[view.index], view.desc, len(view.members)) for view in job.groups]
    memberships = [Membership(ids[view.index], rank) for view in job.groups for rank in view.members]
    tracebacks = [Traceback(i, "\n".join(frame_lines(stack))) for i, stack in enumerate(job.tables.stacks)]
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
    group = job.groups[problem.group]
    made = _collective(job, ids, group, problem.rank, problem.row, number, problem.expected)
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
    name = call_name(job, rank, row)
    stack = [{"name": f.name, "filename": f.file, "line": f.line} for f in job.frames(rank, row)]
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


def frame_lines(stack: Iterable[Frame]) -> list[str]:
    return [f"{frame.name} at {frame.file}:{frame.line}" for frame in stack]


Filters = tuple[frozenset[int], frozenset[str]]  # selected ranks, group names; empty: all


def check_filters(traces: Sequence[RankTrace], filters: Filters) -> None:
    """InputError for a rank or group that is in no dump: silence would read as "nothing wrong"."""
    ranks, groups = filters
    members = {rank for trace in traces for group in trace.groups for rank in group.ranks}
    known = {trace.header.rank for trace in traces if trace.header.rank is not None} | members
    if ranks - known:
        text = ", ".join(map(str, sorted(ranks - known)))
        hint = f"Ranks in the dumps: {', '.join(map(str, sorted(known))) or 'none'}."
        raise InputError(f"--selected-ranks: no rank {text} here", hint=hint)
    names = {
        text for trace in traces for group in trace.groups[1:] for text in (group.name, group.desc) if text
    }
    if groups - names:
        hint = f"Groups in the dumps: {', '.join(sorted(names)) or 'none'}."
        raise InputError(f"--pg-filters: no group {', '.join(sorted(groups - names))} here", hint=hint)


def render_blocks(analysis: Analysis, filters: Filters, cap: int) -> Iterator[str]:
    """The findings, in the original's words and order of lines; at most `cap` per group."""
    counts: Counter[int] = Counter()
    for problem in analysis.problems:
        if not _shown(analysis.job, problem, filters):
            continue
        counts[problem.group] += 1
        if counts[problem.group] > cap:
            group = analysis.job.groups[problem.group]
            if counts[problem.group] == cap + 1:
                yield f"Too many mismatches for process_group {group.name}: {group.desc} aborting"
            continue
        yield problem.headline
        if not problem.bare:
            yield from _block(analysis.job, problem)


def _shown(job: Job, problem: TraceProblem, filters: Filters) -> bool:
    ranks, groups = filters
    group = job.groups[problem.group]
    return (not ranks or bool(ranks & set(problem.involved))) and (
        not groups or bool(groups & {group.name, group.desc, group.label})
    )


def _block(job: Job, problem: TraceProblem) -> Iterator[str]:
    group, call = job.groups[problem.group], job.ranks[problem.rank].trace.calls[problem.row]
    shapes = job.shapes(problem.rank, problem.row)
    yield f"internal record id: {int(call['begin']) - 1}"
    yield f"group info: {group.name}" + (f":{group.desc}" if group.desc not in ("", "undefined") else "")
    yield f"collective: {call_name(job, problem.rank, problem.row)}"
    if problem.missing:
        yield f"missing ranks: {set(problem.missing)}"
    if problem.totals:
        yield f"total input numel: {problem.totals[0]}"
        yield f"total output numel: {problem.totals[1]}"
    yield f"input sizes: {lists(shapes.inputs)}"
    yield f"output sizes: {lists(shapes.outputs)}"
    yield f"world size: {len(problem.expected)}"
    yield f"expected ranks: {set(problem.expected)}"
    yield f"collective state: {STATES[State(int(call['state']))]}"
    if problem.errors:
        yield "error msg: " + ", ".join(f"Culprit rank {rank}; {info}" for rank, info in problem.errors)
    yield "collective stack trace: "
    yield " " + "\n".join(frame_lines(job.frames(problem.rank, problem.row)))


def render_entries(
    traces: Sequence[RankTrace], filters: Filters, verbose: bool, stacks: bool
) -> Iterator[str]:
    """All entries, one column per rank, rows by position; then the stacks by number, if asked."""
    ranks, groups = filters
    shown = [trace for trace in traces if not ranks or trace.header.rank in ranks]
    columns = [list(_cells(trace, groups, verbose)) for trace in shown]
    height = max((len(column) for column in columns), default=0)
    rows = [[column[i] if i < len(column) else "" for column in columns] for i in range(height)]
    yield from table(rows, [f"Rank {trace.header.rank}" for trace in shown])
    if stacks and shown:
        used = sorted({int(number) for trace in shown for number in trace.calls["stack"]} - {0})
        texts = [[str(number), "; ".join(frame_lines(shown[0].stacks[number]))] for number in used]
        yield from table(texts, ["stack_id", "frame_stack"])


def _cells(trace: RankTrace, groups: frozenset[str], verbose: bool) -> Iterator[str]:
    """One text per entry, as the original writes an operation."""
    for call in trace.calls:
        group = trace.groups[int(call["group"])]
        if groups and not groups & {group.name, group.desc}:
            yield ""
            continue
        op, shapes = trace.names[int(call["op"])], trace.shapes[int(call["shapes"])]
        ends = ""
        if op in ("send", "recv"):
            pair = (trace.header.rank, int(call["peer"]))
            ends = f"s={pair[op != 'send']} d={pair[op == 'send']}"
        state = STATES[State(int(call["state"]))]
        if verbose:
            fields = {
                "input_sizes": lists(shapes.inputs),
                "output_sizes": lists(shapes.outputs),
                "input_dtypes": list(shapes.input_dtypes),
                "output_dtypes": list(shapes.output_dtypes),
                "collective_seq_id | p2p_seq_id": int(call["p2p_seq"] if ends else call["seq"]),
                "pg_name": group.name,
                "pg_description": group.desc,
                "pg_size": len(group.ranks),
                "stack_id": int(call["stack"]),
                "state": state,
            }
            known = [f"timestamp_created={int(call['created_ns'])}", *([ends] if ends else [])]
            yield f"{op}({', '.join(known + [f'{name}={value}' for name, value in fields.items()])})"
        else:
            sizes = None if op == "coalesced" else lists(shapes.inputs)
            yield f"{op}({ends + ', ' if ends else ''}input_sizes={sizes}, state={state})"


def render_database(database: Database) -> Iterator[str]:
    """The tables that -v prints."""
    tables: tuple[tuple[str, Iterable[Sequence[object]], tuple[str, ...]], ...] = (
        ("Groups", database.groups, Group._fields),
        ("Memberships", database.memberships, Membership._fields),
        ("Collectives", database.collectives, Collective._fields),
        ("NCCLCalls", database.ncclcalls, NCCLCall._fields),
    )
    for title, rows, fields in tables:
        yield title
        yield from table([[str(cell) for cell in row] for row in rows], list(fields))


def table(rows: list[list[str]], headers: list[str]) -> Iterator[str]:
    """A table with a ruled header, columns as wide as their widest cell."""
    widths = [max([len(header), *(len(row[i]) for row in rows)]) for i, header in enumerate(headers)]
    for cells in (headers, ["-" * width for width in widths], *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
