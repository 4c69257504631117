"""Calls as slices of a trace viewer: begin, end and lane of every call, the missing call, the verdict. Pure.

What both trace formats draw: a viewer's slices of one track may not overlap, so calls that do get lanes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Flag, RankTrace, State
from allranks.report.text import clean

#: Causes in which the guilty ranks lack in the call.
MISSING = frozenset({"missing_rank", "not_started", "stuck_before_collective", "rank_died"})
MAX_ARROWS = 64  # to waiting ranks; more would hide the picture


@dataclass(frozen=True)
class Span:
    """The time that a trace covers, in epoch nanoseconds; unfinished calls are drawn to the end."""

    first_ns: int
    end_ns: int


@dataclass(frozen=True)
class Waiting:
    """The verdict in the picture: since when the call is missing, and which calls wait for it, as (trace, row)."""

    since_ns: int
    name: str
    calls: tuple[tuple[int, int], ...]


def find_span(traces: Sequence[RankTrace]) -> Span:
    """From the first entry to a little after the last event."""
    known = [trace.calls for trace in traces if len(trace.calls)]
    if not known:
        return Span(0, 1)
    first = min(int(calls["created_ns"].min()) for calls in known)
    last = max(int(max(calls["created_ns"].max(), calls["completed_ns"].max())) for calls in known)
    return Span(first, last + max(1_000_000, (last - first) // 20))


def ends_of(calls: np.ndarray, span: Span) -> np.ndarray:
    """When each call ended; the end of the trace for those that have not."""
    over = (calls["state"] == int(State.COMPLETED)) | ((calls["flags"] & int(Flag.RETIRED)) != 0)
    guess = np.where(over, calls["created_ns"] + 1000, span.end_ns)
    found: np.ndarray = np.where(calls["completed_ns"] > calls["created_ns"], calls["completed_ns"], guess)
    return found


def lanes_of(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The lane of each call of a group, 0 unless an earlier one still runs."""
    lanes = np.zeros(len(starts), np.int64)
    if len(starts) < 2 or (starts[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        return lanes
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    used = 0
    for index in np.argsort(starts, kind="stable").tolist():
        while busy and busy[0][0] <= starts[index]:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else used
        used = max(used, lane + 1)
        lanes[index] = lane
        heappush(busy, (int(ends[index]), lane))
    return lanes


def find_waiting(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Waiting | None:
    """The unfinished calls that wait for the guilty ranks; None when the verdict is not about a missing call."""
    verdict = diagnosis.verdict
    if verdict is None or verdict.cause not in MISSING:
        return None
    calls, since, name = [], 0, ""
    wanted = set(verdict.waiting) - set(verdict.ranks)
    for index, trace in enumerate(traces):
        if trace.header.rank not in wanted or not len(trace.calls):
            continue
        unfinished = trace.calls["state"] != int(State.COMPLETED)
        if verdict.sequence is not None:
            unfinished &= trace.calls["seq"] == verdict.sequence
        rows = np.flatnonzero(unfinished)
        if len(rows):
            call = trace.calls[rows[0]]
            calls.append((index, int(rows[0])))
            if not since or int(call["created_ns"]) < since:
                since = int(call["created_ns"])
                name = f"{trace.names[int(call['op'])]} #{int(call['seq'])}"
    return Waiting(since, clean(name), tuple(calls[:MAX_ARROWS])) if calls else None
