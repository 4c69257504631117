"""torchfrtrace's output, line by line: the blocks of an analysis, the table of all entries, the database's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from allranks.diagnose.job import Job
from allranks.errors import InputError
from allranks.frtrace.database import call_name
from allranks.frtrace.problems import STATES, Analysis, TraceProblem, lists
from allranks.frtrace.types import Collective, Database, Group, Membership, NCCLCall
from allranks.model.trace import RankTrace, State

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
    stack = [f"{f.name} at {f.file}:{f.line}" for f in job.frames(problem.rank, problem.row)]
    yield "collective stack trace: "
    yield " " + "\n".join(stack)


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
        texts = [
            [str(i), "; ".join(f"{f.name} at {f.file}:{f.line}" for f in shown[0].stacks[i])] for i in used
        ]
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
