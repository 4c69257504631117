"""Calls on a time line: compact columns for the page (17 bytes a call before compression, no object per call), and slices for
trace viewers (begin, end and lane of every call, the missing call). Pure.

A viewer's slices of one track may not overlap, so calls that do get lanes of their own.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Flag, Frame, RankTrace, State
from allranks.report.text import clean, frame_text

#: More calls than this make a page slow; then only the newest of every rank are drawn.
MAX_CALLS = 3_000_000
MAX_TEXT = 300

OPEN, DONE, FAILED, UNKNOWN = 0, 1, 2, 3


@dataclass
class Timeline:
    """Columns over all calls, rank after rank; `counts` says how many belong to each."""

    ranks: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of ranks of several worlds; none otherwise
    hosts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    base_ns: int = 0
    unit_ns: int = 1000
    end_units: int = 0
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # difference to the call before
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    kinds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # index into `kind_table`
    seqs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    stacks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint16))  # index into `stack_table`
    kind_table: list[tuple[str, str, str]] = field(default_factory=list)  # (operation, group, sizes)
    stack_table: list[list[str]] = field(default_factory=list)
    left_out: int = 0


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """The columns of all traces, in rank order."""
    ordered = sorted(traces, key=lambda trace: trace.header.rank if trace.header.rank is not None else -1)
    total = sum(len(trace.calls) for trace in ordered)
    keep = MAX_CALLS // max(1, len(ordered)) if total > MAX_CALLS else None
    line = Timeline(kind_table=[("", "", "")], stack_table=[[]])
    tables = _Tables(line)
    parts = [(trace, trace.calls[-keep:] if keep else trace.calls) for trace in ordered]
    line.left_out = total - sum(len(calls) for _, calls in parts)
    _time_frame(line, [calls for _, calls in parts])
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    for trace, calls in parts:
        line.ranks.append(trace.header.rank if trace.header.rank is not None else -1)
        line.names += [trace.header.name] if trace.header.worlds else []
        line.hosts.append(trace.header.host)
        line.counts.append(len(calls))
        for name, column in _columns(line, tables, trace, calls).items():
            columns[name].append(column)
    for name, chunks in columns.items():
        if chunks:
            setattr(line, name, np.concatenate(chunks))
    return line


_COLUMNS = ("starts", "lengths", "kinds", "seqs", "states", "stacks")


def _time_frame(line: Timeline, parts: list[np.ndarray]) -> None:
    created = [calls["created_ns"] for calls in parts if len(calls)]
    if not created:
        return
    first = min(int(column[column > 0].min()) if (column > 0).any() else 0 for column in created)
    last = max(
        max(int(calls["created_ns"].max()), int(calls["completed_ns"].max())) for calls in parts if len(calls)
    )
    span = max(1, last - first)
    line.base_ns, line.unit_ns = first, max(1000, span >> 30)
    line.end_units = span // line.unit_ns + max(1, span // line.unit_ns // 20)


def _columns(line: Timeline, tables: _Tables, trace: RankTrace, calls: np.ndarray) -> dict[str, np.ndarray]:
    starts = np.clip((calls["created_ns"] - line.base_ns) // line.unit_ns, 0, line.end_units)
    ends = np.where(calls["completed_ns"] > 0, (calls["completed_ns"] - line.base_ns) // line.unit_ns, starts)
    states = _states(calls)
    lengths = np.where(states == OPEN, line.end_units - starts, np.clip(ends - starts, 0, line.end_units))
    return {
        "starts": np.diff(starts, prepend=0).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "kinds": tables.kinds(trace, calls),
        "seqs": np.clip(calls["seq"], -1, 2**31 - 1).astype(np.int32),
        "states": states,
        "stacks": tables.stacks(trace, calls),
    }


def _states(calls: np.ndarray) -> np.ndarray:
    flags, state = calls["flags"], calls["state"]
    retired = (flags & int(Flag.RETIRED)) != 0
    found = np.full(len(calls), OPEN, np.uint8)
    found[state == int(State.COMPLETED)] = DONE
    found[(state == int(State.FAILED)) | (state == int(State.TIMED_OUT))] = FAILED
    undone = (state == int(State.SCHEDULED)) | (state == int(State.STARTED))
    found[undone & retired] = UNKNOWN
    found[(flags & int(Flag.COALESCED_PART | Flag.CAPTURED)) != 0] = UNKNOWN
    return found


class _Tables:
    """Interns kinds and stacks over all ranks."""

    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._kinds: dict[tuple[str, str, str], int] = {("", "", ""): 0}
        self._stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self._maps: dict[int, tuple[object, np.ndarray]] = {}

    def kinds(self, trace: RankTrace, calls: np.ndarray) -> np.ndarray:
        packed = calls["group"].astype(np.int64) << 48 | calls["op"].astype(np.int64) << 28 | calls["shapes"]
        values, inverse = np.unique(packed, return_inverse=True)
        numbers = [
            self._kind(trace, int(v) >> 48, int(v) >> 28 & 0xFFFFF, int(v) & 0xFFFFFFF) for v in values
        ]
        found: np.ndarray = np.array(numbers, np.uint16)[inverse] if len(values) else np.zeros(0, np.uint16)
        return found

    def _kind(self, trace: RankTrace, group: int, op: int, shapes: int) -> int:
        known, shape = trace.groups[group], trace.shapes[shapes]
        sizes = f"{[list(size) for size in shape.inputs]} → {[list(size) for size in shape.outputs]}"
        types = "/".join(dict.fromkeys(shape.input_dtypes or shape.output_dtypes))
        label = known.name if known.desc in ("", "undefined") else f"{known.desc} ({known.name})"
        name, label, text = (clean(t)[:MAX_TEXT] for t in (trace.names[op], label, f"{sizes} {types}"))
        table, key = self._line.kind_table, (name, label, text)
        if key not in self._kinds:
            if len(table) > 0xFFFF:
                return 0
            self._kinds[key] = len(table)
            table.append(key)
        return self._kinds[key]

    def stacks(self, trace: RankTrace, calls: np.ndarray) -> np.ndarray:
        known = self._maps.get(id(trace.stacks))
        if known is None or known[0] is not trace.stacks:
            used = np.array([self._stack(stack) for stack in trace.stacks] or [0], np.uint16)
            known = self._maps[id(trace.stacks)] = (trace.stacks, used)
        found: np.ndarray = known[1][calls["stack"]]
        return found

    def _stack(self, stack: tuple[Frame, ...]) -> int:
        found = self._stacks.get(stack)
        if found is None:
            lines = [frame_text(frame)[:MAX_TEXT] for frame in stack[:24]]
            found = self._stacks[stack] = min(len(self._line.stack_table), 0xFFFF)
            if found == len(self._line.stack_table):
                self._line.stack_table.append(lines)
        return found if found < len(self._line.stack_table) else 0


def pack(column: np.ndarray) -> str:
    """Little-endian bytes, deflated, in base64."""
    data = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


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
