"""Converts a `RankTrace` into a dump of PyTorch's Flight Recorder, version 2.10. Pure, no torch.

`to_torch_dump` returns the content of the pickle, `to_torch_json` the JSON (no frames, no None, status as text). torchfrtrace
reads the pickle: ops have torch's names, group members are complete (also for gloo, where torch's dumps lack them), and a
failed or timed-out call is retired, but not completed.
"""

from __future__ import annotations

import json
import pickle

import numpy as np

from allranks.model.trace import Flag, Group, RankTrace, Shapes, State

VERSION = "2.10"
OPS = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_gather_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
}
_STATES = {State.SCHEDULED: "scheduled", State.STARTED: "started", State.COMPLETED: "completed"}

Dump = dict[str, object]


def to_torch_dump(
    trace: RankTrace,
    *,
    include_completed: bool = True,
    include_stack_traces: bool = True,
    include_collectives: bool = True,
) -> Dump:
    """The dictionary that torch pickles; without collectives it has no "entries", as in torch."""
    rows = trace.calls if include_completed else trace.calls[_active(trace.calls)]
    frames = _frames(trace) if include_stack_traces else None
    dump: Dump = {
        "version": VERSION,
        "pg_config": {
            group.name: {"name": group.name, "desc": group.desc, "ranks": str(list(group.ranks))}
            for group in trace.groups[1:]
        },
        "comm_lib_version": dict(trace.header.versions).get("nccl", ""),
        # by pg_id: torch counts groups from 0, `trace.groups` from 1
        "pg_status": {str(index - 1): _group_status(trace, index) for index in range(1, len(trace.groups))},
    }
    if include_collectives:
        dump["entries"] = [_entry(trace, row, frames) for row in rows]
    return dump


def to_torch_pickle(trace: RankTrace, **content: bool) -> bytes:
    """The dump as pickle (protocol 2, as in torch). `content`: the options of `to_torch_dump`."""
    return pickle.dumps(to_torch_dump(trace, **content), protocol=2)


def to_torch_json(trace: RankTrace, **content: bool) -> str:
    """The dump as torch's JSON: no frames, 0 for unknown times, numbers of pg_status as text."""
    dump = to_torch_dump(trace, **{**content, "include_stack_traces": False})
    if "entries" in dump:
        dump["entries"] = [
            {key: 0 if value is None else value for key, value in entry.items()}
            for entry in dump["entries"]  # type: ignore[attr-defined]
        ]
    status = {
        group: {key: str(value) for key, value in numbers.items()}
        for group, numbers in dump["pg_status"].items()  # type: ignore[attr-defined]
    }
    return json.dumps({**dump, "pg_status": status, "nccl_comm_state": {}}, separators=(",", ":"))


def _active(rows: np.ndarray) -> np.ndarray:
    """Mask of the calls that are neither completed nor retired."""
    mask: np.ndarray = (rows["state"] < State.COMPLETED) & (rows["flags"] & Flag.RETIRED == 0)
    return mask


def _group_status(trace: RankTrace, index: int) -> dict[str, int]:
    rows = trace.calls[(trace.calls["group"] == index) & (trace.calls["p2p_seq"] == 0)]

    def last(mask: np.ndarray) -> int:
        return int(rows["seq"][mask].max()) if mask.any() else -1

    return {
        "last_enqueued_collective": last(rows["seq"] >= 0),
        "last_started_collective": last(rows["started_ns"] > 0),
        "last_completed_collective": last(rows["state"] == State.COMPLETED),
    }


def _frames(trace: RankTrace) -> list[list[dict[str, object]]]:
    """The frames of every distinct stack; entries share them, which keeps the pickle small, as in torch."""
    return [
        [{"name": frame.name, "filename": frame.file, "line": frame.line} for frame in stack]
        for stack in trace.stacks
    ]


def _entry(trace: RankTrace, row: np.void, frames: list[list[dict[str, object]]] | None) -> dict[str, object]:
    group = trace.groups[int(row["group"])]
    op = trace.names[int(row["op"])]
    shapes = _as_torch_writes(trace.shapes[int(row["shapes"])], op)
    flags, state = int(row["flags"]), State(int(row["state"]))
    started, completed = int(row["started_ns"]), int(row["completed_ns"])
    entry: dict[str, object] = {}
    if frames is not None:
        entry["frames"] = list(frames[int(row["stack"])])
    entry |= {
        "record_id": int(row["begin"]) - 1,
        "pg_id": int(row["group"]) - 1,
        "process_group": (group.name, group.desc),
        "thread_name": trace.threads.get(int(row["thread"]), ""),
        "thread_id": str(int(row["thread"])),
        "collective_seq_id": int(row["seq"]),
        "p2p_seq_id": int(row["p2p_seq"]),
        "op_id": int(row["op_id"]),
        "profiling_name": profiling_name(group, op, trace.header.rank, int(row["peer"])),
        "time_created_ns": int(row["created_ns"]),
    }
    if state is State.COMPLETED:
        entry["duration_ms"] = (completed - (started or int(row["created_ns"]))) / 1e6
    entry |= {
        "input_sizes": [list(shape) for shape in shapes.inputs],
        "input_dtypes": list(shapes.input_dtypes),
        "output_sizes": [list(shape) for shape in shapes.outputs],
        "output_dtypes": list(shapes.output_dtypes),
        "state": _STATES.get(state, "started" if started else "scheduled"),
        "time_discovered_started_ns": started or None,
        "time_discovered_completed_ns": (completed or None) if state is State.COMPLETED else None,
        "retired": state >= State.COMPLETED or bool(flags & Flag.RETIRED),
        "timeout_ms": int(row["timeout_ms"]),
        "is_p2p": bool(flags & Flag.P2P),
    }
    return entry


def profiling_name(group: Group, op: str, rank: int | None, peer: int) -> str:
    """torch's name of a call: "nccl:send 0->1", with group-local ranks for send and recv."""
    name = f"{_backend(group)}:{OPS.get(op, op)}"
    if op not in {"send", "recv"}:
        return name
    own, other = _local(group, -1 if rank is None else rank), _local(group, peer)
    return f"{name} {own}->{other}" if op == "send" else f"{name} {own}<-{other}"


def _backend(group: Group) -> str:
    """ "nccl2" for "nccl2" and for "cpu:gloo,cuda:nccl2" (the device comes last); "c10d", as in torch, if unknown."""
    return group.backend.lower().split(",")[-1].rpartition(":")[2] or "c10d"


def _local(group: Group, rank: int) -> str:
    if rank < 0:
        return "?"
    return str(group.ranks.index(rank)) if rank in group.ranks else str(rank)


def _as_torch_writes(shapes: Shapes, op: str) -> Shapes:
    """Shapes as in torch, which records both sides of a send or recv, and equal parts of a list as one tensor."""
    if op == "send":
        return Shapes(shapes.inputs, shapes.inputs, shapes.input_dtypes, shapes.input_dtypes)
    if op == "recv":
        return Shapes(shapes.outputs, shapes.outputs, shapes.output_dtypes, shapes.output_dtypes)
    if op == "all_gather":
        outputs, dtypes = _joined(shapes.outputs, shapes.output_dtypes)
        return Shapes(shapes.inputs, outputs, shapes.input_dtypes, dtypes)
    if op == "reduce_scatter":
        inputs, dtypes = _joined(shapes.inputs, shapes.input_dtypes)
        return Shapes(inputs, shapes.outputs, dtypes, shapes.output_dtypes)
    return shapes


def _joined(
    parts: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    if len(parts) > 1 and len(set(parts)) == 1 and len(set(dtypes)) == 1:
        return ((len(parts), *parts[0]),), dtypes[:1]
    return parts, dtypes
