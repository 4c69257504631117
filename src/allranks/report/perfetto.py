"""The calls as a Chrome JSON trace, for ui.perfetto.dev and chrome://tracing: one process per rank, one track per group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import RankTrace, State
from allranks.report.text import clean, state_name


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Iterator[str]:
    """The file, in parts: one event per call, open calls drawn to the end of the trace."""
    last = max(
        (
            int(max(t.calls["created_ns"].max(), t.calls["completed_ns"].max()))
            for t in traces
            if len(t.calls)
        ),
        default=0,
    )
    first = min((int(t.calls["created_ns"].min()) for t in traces if len(t.calls)), default=0)
    end_ns = last + max(1_000_000, (last - first) // 20)
    yield '{"displayTimeUnit":"ms","otherData":'
    yield json.dumps(
        {"status": diagnosis.status, "verdict": diagnosis.verdict.sentence if diagnosis.verdict else ""}
    )
    yield ',"traceEvents":[\n'
    separator = ""
    for trace in traces:
        for event in _events(trace, first, end_ns, diagnosis):
            yield separator + json.dumps(event, separators=(",", ":"))
            separator = ",\n"
    yield "\n]}\n"


def _events(
    trace: RankTrace, first_ns: int, end_ns: int, diagnosis: Diagnosis
) -> Iterator[dict[str, object]]:
    rank = trace.header.rank if trace.header.rank is not None else -1
    guilty = diagnosis.verdict is not None and rank in diagnosis.verdict.ranks
    host = f" ({trace.header.host})" if trace.header.host else ""
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": rank,
        "args": {"name": clean(f"rank {rank}{host}{' GUILTY' if guilty else ''}")},
    }
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for index in sorted(set(trace.calls["group"].tolist())):
        group = trace.groups[index]
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": index,
            "args": {"name": clean(group.desc or group.name)},
        }
    for call in trace.calls:
        state = int(call["state"])
        created, completed = int(call["created_ns"]), int(call["completed_ns"])
        retired = bool(int(call["flags"]) & 8)
        end = (
            completed
            if completed > created
            else created + 1000
            if state == int(State.COMPLETED) or retired
            else end_ns
        )
        shapes = trace.shapes[int(call["shapes"])]
        stack = trace.stacks[int(call["stack"])]
        yield {
            "ph": "X", "name": clean(trace.names[int(call["op"])]), "cat": state_name(state), "pid": rank, "tid": int(call["group"]),
            "ts": (created - first_ns) / 1000, "dur": max(1, end - created) / 1000,
            "args": {
                "sequence": int(call["seq"]), "state": state_name(state), "inputs": str([list(s) for s in shapes.inputs]),
                "outputs": str([list(s) for s in shapes.outputs]),
                "stack": clean(" < ".join(f"{f.file}:{f.line} in {f.name}" for f in stack[:8])),
            },
        }  # fmt: skip
