"""An Analysis → torchfrtrace's output line by line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from allranks.diagnosis.job import Job
from allranks.errors import InputError
from allranks.frtrace.problems import STATES, Analysis, TraceProblem, lists
from allranks.model.torch_dump import profiling_name
from allranks.model.trace import Frame, RankTrace, State


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
