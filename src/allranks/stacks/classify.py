"""From a capture to the report: what each rank does, whether the job is hung, and whose fault it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.model.stacks import (
    Capture,
    ChildState,
    ProcessCapture,
    RankState,
    Snapshot,
    StacksReport,
)
from allranks.stacks import ras
from allranks.stacks.blame import find_culprits, find_straggler, tell
from allranks.stacks.causes import Cause, find_cause
from allranks.stacks.patterns import Pattern, load_patterns
from allranks.stacks.progress import WAITS, Progress, Stillness, decide_by_counts, decide_progress
from allranks.stacks.views import Children, ProcessView

_ALWAYS = frozenset({"stopped", "d_state"})


def classify(
    capture: Capture, patterns: Sequence[Pattern] | None = None, stillness: Stillness | None = None
) -> StacksReport:
    """The report of a capture; a rank that cannot be read is `unknown` with the reason."""
    table = load_patterns() if patterns is None else patterns
    families: dict[int, list[ProcessCapture]] = {}
    for process in capture.processes:
        if process.child is not None:
            families.setdefault(process.rank, []).append(process)
    causes: dict[int, Cause] = {}
    views: dict[int, ProcessView] = {}
    states: dict[int, RankState] = {}
    for process in capture.processes:
        if process.child is None:
            cause, view = find_cause(process, table, _family(families.get(process.rank, [])))
            causes[process.rank], views[process.rank] = cause, view
            states[process.rank] = _state(process, cause, _children(families.get(process.rank, []), table))
    limits = stillness or Stillness()
    progress = decide_progress({one.rank: one for one in capture.marks}, views, causes, limits)
    if progress.hung is None:
        progress = decide_by_counts(progress, ras.stood_still_s(capture.ras), limits)
    if progress.hung and {state.cause for state in states.values()} == {"request_wait"}:
        progress = replace(progress, hung=False, reason="an idle server: every rank waits for requests")
    states, culprits = _judge(capture, progress, states, table)
    if not culprits and progress.hung is not False:
        culprits = _behind(capture)
    return StacksReport(
        hung=progress.hung,
        culprits=culprits,
        sentence=tell(capture, progress, culprits, states),
        ranks=states,
        reason=progress.reason,
        ras=ras.tell(capture.ras),
        notes=(*capture.notes, *(f"rank {p.rank}: {note}" for p in capture.processes for note in p.notes)),
    )


def _behind(capture: Capture) -> tuple[int, ...]:
    """The ranks that NCCL RAS knows to be behind, where stacks show no difference."""
    pids = {one.pid for one in ras.find_laggards(capture.ras)}
    return tuple(sorted(p.rank for p in capture.processes if p.child is None and p.pid in pids))


def _family(children: Sequence[ProcessCapture]) -> Children:
    return Children(bool(children), any(shot.stacks for child in children for shot in child.snapshots))


def _judge(
    capture: Capture, progress: Progress, states: dict[int, RankState], table: Sequence[Pattern]
) -> tuple[dict[int, RankState], tuple[int, ...]]:
    """Causes and culprits in the light of progress: in a job that moves a wait is no fault."""
    if progress.hung is not False:
        return states, find_culprits(states, progress.hung)
    held = tuple(sorted(rank for rank, state in states.items() if state.cause in _ALWAYS))
    if held:
        return states, held
    if {state.cause for state in states.values()} == {"request_wait"}:
        return states, ()
    slow = find_straggler(states, _waited(capture, table))
    judged = {rank: _in_motion(state, rank in slow, bool(slow)) for rank, state in states.items()}
    return judged, slow


def _in_motion(state: RankState, slow: bool, somebody_slow: bool) -> RankState:
    if slow:
        return replace(
            state, cause="slow", evidence=f"the others wait for it in every look; it {state.evidence}"
        )
    if somebody_slow and state.cause in WAITS:
        return state
    return replace(state, cause="healthy", evidence=f"makes progress; at the last look: {state.evidence}")


def _waited(capture: Capture, table: Sequence[Pattern]) -> dict[int, float]:
    """For each rank the share of its snapshots in which it waited for others."""
    shares = {}
    for process in capture.processes:
        if process.child is None and process.snapshots:
            waits = [_snapshot_waits(process, snapshot, table) for snapshot in process.snapshots]
            shares[process.rank] = sum(waits) / len(waits)
    return shares


def _snapshot_waits(process: ProcessCapture, snapshot: Snapshot, table: Sequence[Pattern]) -> bool:
    cause, _ = find_cause(replace(process, snapshots=(snapshot,)), table)
    return cause.cause in WAITS


def _state(process: ProcessCapture, cause: Cause, children: tuple[ChildState, ...]) -> RankState:
    return RankState(
        rank=process.rank,
        cause=cause.cause,
        where=cause.where,
        evidence=cause.evidence + _child_tail(cause, children),
        children=children,
        threads=cause.threads,
        operation=cause.operation,
        thread=cause.thread,
        stack=cause.stack,
        host=process.host,
        pid=process.pid,
        confidence=cause.confidence,
        notes=process.notes,
    )


def _child_tail(cause: Cause, children: tuple[ChildState, ...]) -> str:
    """What the children do belongs to the evidence of a rank that waits for them."""
    if cause.cause not in ("dataloader_wait", "child_process_wait", "shutdown_join", "queue_wait"):
        return ""
    busy = [child for child in children if child.cause not in ("queue_wait", "healthy", "unknown")]
    return "".join(f"; child {c.child} (pid {c.pid}): {c.cause} at {c.where}" for c in busy[:4])


def _children(children: Sequence[ProcessCapture], table: Sequence[Pattern]) -> tuple[ChildState, ...]:
    found = []
    for process in children:
        cause, _ = find_cause(process, table)
        found.append(ChildState(process.child or 0, process.pid, cause.cause, cause.where, cause.evidence))
    return tuple(found)
