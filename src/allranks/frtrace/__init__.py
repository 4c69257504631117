"""Renders a diagnosis as the output of torchfrtrace: one TraceProblem per block. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from allranks.diagnosis.job import GroupView, Job
from allranks.diagnosis.match import Mismatch
from allranks.diagnosis.verdict import DiagnoseOptions, diagnose, examine
from allranks.diagnosis.waits import Blocked
from allranks.errors import InputError
from allranks.model.diagnosis import FileNote
from allranks.model.torch_dump import profiling_name
from allranks.model.trace import RankTrace, State

STATES = {state: state.name.lower() for state in State}
#: Selected ranks and names of groups; empty: all.
Filters = tuple[frozenset[int], frozenset[str]]
NOT_ALL = "Not all ranks joining collective, sequence number"


@dataclass(frozen=True)
class TraceProblem:
    """A collective with a problem, as seen from `rank`, whose call is `row`."""

    headline: str
    group: int
    seq: int
    rank: int
    row: int
    expected: tuple[int, ...]
    missing: tuple[int, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()  # (rank, error in torchfrtrace's words)
    totals: tuple[int, int] | None = None
    involved: tuple[int, ...] = ()
    bare: bool = False  # print only the headline


@dataclass(frozen=True)
class Analysis:
    """An aligned job with its problems, the root cause first."""

    job: Job
    problems: tuple[TraceProblem, ...]


def analyse(traces: Sequence[RankTrace], files: Sequence[FileNote] = (), now_ns: int = 0) -> Analysis:
    """Diagnoses the traces; wrapped rings, point-to-point calls and uneven sizes are not problems."""
    options = DiagnoseOptions(now_ns=now_ns)
    examined = examine(traces, files, options)
    context, mismatches = examined.context, examined.mismatches
    job = context.job
    diagnosis = diagnose(traces, files, options=options)
    named = {(finding.group, finding.sequence): set(finding.ranks) for finding in diagnosis.findings}
    found = [
        _mismatched(job, mismatch, named.get((job.groups[mismatch.group].label, mismatch.seq), set()))
        for mismatch in mismatches
    ]
    misfit = {mismatch.group: mismatch.seq for mismatch in mismatches}
    explained = [b for b in context.blocked if b.missing or b.absent or b.seq < misfit.get(b.group, 1 << 62)]
    found += [_blocked(job, blocked) for blocked in sorted(explained, key=context.age)]
    order = {(finding.group, finding.sequence): -i for i, finding in enumerate(reversed(diagnosis.findings))}
    found.sort(key=lambda problem: order.get((job.groups[problem.group].label, problem.seq), 1))
    return Analysis(job, tuple(found))


def _blocked(job: Job, blocked: Blocked) -> TraceProblem:
    """A call that some ranks did not join, or that no rank finished."""
    rank, row = min(blocked.rows.items())
    group = job.groups[blocked.group]
    calls = job.ranks[rank].trace.calls
    seq = blocked.seq if blocked.p2p is None else int(calls["p2p_seq"][row])
    expected = group.members if blocked.p2p is None else tuple(sorted({rank, blocked.p2p.peer} - {-1}))
    involved = tuple(sorted({*blocked.rows, *blocked.missing, *blocked.absent}))
    problem = TraceProblem("", blocked.group, seq, rank, row, expected, involved=involved)
    if blocked.missing:
        return replace(problem, headline=f"{NOT_ALL}: {seq}", missing=blocked.missing)
    lacking = blocked.absent or blocked.unsure
    if lacking:
        headline = (
            f"We cannot decide what's wrong with this collective entry because we missed FR dumps from ranks ({set(lacking)}) "
            "so we don't have enough information. If you want to debug further use -j to dump all raw trace"
        )
    else:
        headline = "No errors found for this collective entry, There could be some other reasons why we see collective timeout."
    return replace(problem, bare=True, headline=headline)


def _mismatched(job: Job, mismatch: Mismatch, guilty: set[int]) -> TraceProblem:
    """Calls that do not match; the largest class without a rank that `diagnose` blames is the reference."""
    group = job.groups[mismatch.group]
    classes = sorted(mismatch.classes, key=lambda each: bool(guilty & set(each[1])))
    mismatch = replace(mismatch, classes=tuple(classes))
    reference = mismatch.classes[0][1][0]
    row = group.lanes[reference].row(mismatch.seq)
    involved = tuple(sorted(rank for _, ranks in mismatch.classes for rank in ranks))
    problem = TraceProblem("", mismatch.group, mismatch.seq, reference, row, group.members, involved=involved)
    if mismatch.aspect == "split":
        headline = f"Input/output mismatch in the collective sequence number: {mismatch.seq}"
        return replace(problem, headline=headline, totals=_totals(job, group, mismatch.seq))
    errors = tuple(
        (rank, _match_info(job, mismatch, group, reference, rank))
        for _, ranks in mismatch.classes[1:]
        for rank in ranks
    )
    return replace(problem, headline=f"Collective sequence number: {mismatch.seq} has errors", errors=errors)


def _totals(job: Job, group: GroupView, seq: int) -> tuple[int, int]:
    rows = [(job.ranks[rank].trace.calls, lane.row(seq)) for rank, lane in group.lanes.items()]
    known = [calls[row] for calls, row in rows if row >= 0]
    return sum(int(call["in_numel"]) for call in known), sum(int(call["out_numel"]) for call in known)


def _match_info(job: Job, mismatch: Mismatch, group: GroupView, reference: int, rank: int) -> str:
    """The disagreement of one rank with the reference, in torchfrtrace's words."""
    inside = dict(mismatch.rows)  # of a coalesced batch
    one, two = (inside.get(r, group.lanes[r].row(mismatch.seq)) for r in (reference, rank))
    right, wrong = job.shapes(reference, one), job.shapes(rank, two)
    if mismatch.cause == "type_mismatch" and job.op(reference, one) != job.op(rank, two):
        text = f"collective type: '{job.op(reference, one)}' does not match found collective type: '{job.op(rank, two)}'"
        return _error("COLLECTIVE_TYPE_MISMATCH", text)
    if mismatch.cause == "dtype_mismatch":
        found = f"{_set(right.output_dtypes)}/{_set(wrong.input_dtypes)}/{_set(wrong.output_dtypes)}"
        text = f"dtypes: '{_set(right.input_dtypes)}' does not match found dtype: '{found}'"
        return _error("COLLECTIVE_DTYPE_MISMATCH", text)
    if mismatch.cause == "size_mismatch":
        side = "output" if mismatch.aspect == "output" else "input"
        want, have = (lists(s.outputs if side == "output" else s.inputs) for s in (right, wrong))
        text = f"{side} sizes: '{want}' does not match found {side} sizes: '{have}'"
        return _error("SIZE_OR_SYNTAX_MISMATCH", text)
    words = {member: text for text, ranks in mismatch.classes for member in ranks}
    return _error("SIZE_OR_SYNTAX_MISMATCH", f"{words[reference]} does not match found {words[rank]}")


def _error(kind: str, text: str) -> str:
    return f"Error type: {kind}, Expected {text}"


def _set(words: tuple[str, ...]) -> str:
    return str(set(words)) if words else "set()"


def lists(sizes: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """Sizes as torch prints them: [[4, 4]]."""
    return [list(size) for size in sizes]


def call_name(job: Job, rank: int, row: int) -> str:
    """ "nccl:all_reduce" or "nccl:send 0->1", as in the dump."""
    trace = job.ranks[rank].trace
    call = trace.calls[row]
    group = trace.groups[int(call["group"])]
    op = trace.names[int(call["op"])]
    if op in ("send", "recv"):
        return profiling_name(group, op, rank, int(call["peer"]))
    return f"{group.backend}:{op}" if group.backend else op


def check_filters(traces: Sequence[RankTrace], filters: Filters) -> None:
    """Raises InputError for a rank or group that is in no dump."""
    ranks, groups = filters
    members = {rank for trace in traces for group in trace.groups for rank in group.ranks}
    known = {trace.header.rank for trace in traces if trace.header.rank is not None} | members
    if ranks - known:
        text = ", ".join(map(str, sorted(ranks - known)))
        hint = f"Ranks in the dumps: {', '.join(map(str, sorted(known))) or 'none'}."
        raise InputError(f"--selected-ranks: no dump has rank {text}", hint=hint)
    names = {
        text for trace in traces for group in trace.groups[1:] for text in (group.name, group.desc) if text
    }
    if groups - names:
        hint = f"Groups in the dumps: {', '.join(sorted(names)) or 'none'}."
        raise InputError(f"--pg-filters: no dump has group {', '.join(sorted(groups - names))}", hint=hint)


def render_blocks(analysis: Analysis, filters: Filters, cap: int) -> Iterator[str]:
    """The findings in torchfrtrace's words and order; at most `cap` per group."""
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
    frames = job.frames(problem.rank, problem.row)
    yield " " + "\n".join(f"{frame.name} at {frame.file}:{frame.line}" for frame in frames)
