"""The calls as a Chrome JSON trace, for chrome://tracing and scripts: one process per rank, one thread per group.

Larger than the Perfetto format; stacks are written once, in `otherData.stacks`, and referred to by number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import Frame, RankTrace
from allranks.report.text import clean, frame_text, headline_text, state_name
from allranks.report.timeline import Span, Waiting, ends_of, find_span, find_waiting, lanes_of

VERDICT = 10_000_000  # the process that holds the marker
MAX_LANES = 16


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Iterator[str]:
    """The file, in parts; unfinished calls are drawn to the end."""
    span, waiting = find_span(traces), find_waiting(diagnosis, traces)
    stacks: dict[tuple[Frame, ...], int] = {}
    since = (waiting.since_ns if waiting else span.first_ns) - span.first_ns
    mark = {"ph": "i", "s": "g", "name": clean(headline_text(diagnosis)), "pid": VERDICT, "tid": 0}
    yield '{"displayTimeUnit":"ms","traceEvents":[\n' + json.dumps({**mark, "ts": since / 1000})
    guilty = set(() if diagnosis.verdict is None else diagnosis.verdict.ranks)
    for index, trace in enumerate(traces):
        rank = -1 if trace.header.rank is None else trace.header.rank
        for event in _events(trace, rank, span, rank in guilty, stacks):
            yield ",\n" + json.dumps(event, separators=(",", ":"))
        for event in _waiting(index, trace, rank, span, waiting, rank in guilty):
            yield ",\n" + json.dumps(event, separators=(",", ":"))
    verdict = diagnosis.verdict.sentence if diagnosis.verdict else ""
    table = [[frame_text(frame) for frame in stack[:24]] for stack in stacks]
    about = {"status": diagnosis.status, "verdict": verdict, "stacks": table}
    yield f'\n],"otherData":{json.dumps(about)}}}\n'


def _events(
    trace: RankTrace, rank: int, span: Span, guilty: bool, stacks: dict[tuple[Frame, ...], int]
) -> Iterator[dict[str, object]]:
    host = f" ({trace.header.host})" if trace.header.host else ""
    name = clean(f"rank {rank}{host}{' GUILTY' if guilty else ''}")
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    calls, ends = trace.calls, ends_of(trace.calls, span)
    lanes = np.zeros(len(calls), np.int64)
    for number in np.unique(calls["group"]).tolist():
        rows = np.flatnonzero(calls["group"] == number)
        lanes[rows] = np.minimum(lanes_of(calls["created_ns"][rows], ends[rows]), MAX_LANES - 1)
        group = trace.groups[number]
        for lane in range(int(lanes[rows].max()) + 1):
            label = clean(group.desc or group.name) + (f" ({lane + 1})" if lane else "")
            thread = {"pid": rank, "tid": number * MAX_LANES + lane}
            yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": label}}
    for row, call in enumerate(calls):
        stack = stacks.setdefault(trace.stacks[int(call["stack"])], len(stacks))
        start = int(call["created_ns"])
        yield {
            "ph": "X",
            "name": clean(trace.names[int(call["op"])]),
            "pid": rank,
            "tid": int(call["group"]) * MAX_LANES + int(lanes[row]),
            "ts": (start - span.first_ns) / 1000,
            "dur": max(1, int(ends[row]) - start) / 1000,
            "args": {"sequence": int(call["seq"]), "state": state_name(int(call["state"])), "stack": stack},
        }


def _waiting(
    index: int, trace: RankTrace, rank: int, span: Span, waiting: Waiting | None, guilty: bool
) -> Iterator[dict[str, object]]:
    """The missing call on a guilty rank's row, and the arrows to those that wait."""
    if waiting is None:
        return
    since = (waiting.since_ns - span.first_ns) / 1000
    arrow = {"name": "waits", "cat": "waits", "pid": rank}
    if guilty:
        home = {"pid": rank, "tid": -1, "ts": since}
        length = (span.end_ns - waiting.since_ns) / 1000
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": -1, "args": {"name": "missing call"}}
        yield {"ph": "X", "name": f"never entered {waiting.name}", **home, "dur": length}
        yield from ({"ph": "s", "id": number, **arrow, **home} for number in range(len(waiting.calls)))
    for number, (owner, row) in enumerate(waiting.calls):
        if owner == index:
            at = (int(trace.calls["created_ns"][row]) - span.first_ns) / 1000
            tid = int(trace.calls["group"][row]) * MAX_LANES
            yield {"ph": "f", "bp": "e", "id": number, **arrow, "tid": tid, "ts": at}
