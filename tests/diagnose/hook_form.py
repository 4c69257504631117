"""Recorded calls in the form in which torch's hook (2.15 and later) dumps them, for backends without a recorder of their own.

Seen in real dumps of the hook: operations are counted from 0, sends and receives among them; a collective keeps the number of the last
message; nothing is ever "started"; `pg_status` counts operations. With a completion hook (nccl2) a finished call is
completed and retired, one that hangs neither, and the parts of a batch are completed at once. Without one every call
is "scheduled" and retired.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allranks.model.torch_dump import to_torch_dump
from allranks.model.trace import RankTrace

BATCHES = {"batch_isend_irecv", "_coalescing_manager"}


def hook_dump(trace: RankTrace, backend: str = "nccl2", completions: bool = True) -> dict[str, Any]:
    """The dump of one rank."""
    dump: Any = to_torch_dump(trace)
    counts: dict[str, list[int]] = {}
    entries, ended = [], {}
    for entry in dump["entries"]:
        op = entry["profiling_name"].partition(":")[2]
        if op == "coalesced":
            continue  # the hook sees the calls of a batch, not its end
        count = counts.setdefault(entry["process_group"][0], [0, 0])
        count[bool(entry["is_p2p"])] += 1
        entry |= {"profiling_name": f"{backend}:{op}", "collective_seq_id": count[0], "p2p_seq_id": count[1]}
        entry |= {"op_id": sum(count) - 1, "time_discovered_started_ns": None, "record_id": len(entries)}
        entry.pop("duration_ms", None)
        _set_state(entry, completions)
        ended[str(entry["pg_id"])] = (entry["op_id"], entry["state"] == "completed")
        entries.append(entry)
    status = {
        pg: {"last_enqueued_collective": op, "last_started_collective": -1, "last_completed_collective": op if done else op - 1}
        for pg, (op, done) in ended.items()
    }  # fmt: skip
    return {**dump, "entries": entries, "pg_status": status}


def _set_state(entry: dict[str, Any], completions: bool) -> None:
    done = entry["state"] == "completed"
    batch = entry["is_p2p"] and any(frame["name"] in BATCHES for frame in entry["frames"])
    if batch and completions:
        end = entry["time_created_ns"] + 5_000
        entry |= {"state": "completed", "retired": True, "time_discovered_completed_ns": end}
    elif not completions:
        entry |= {"state": "scheduled", "retired": True, "time_discovered_completed_ns": None}
    else:
        entry |= {"state": "completed" if done else "scheduled", "retired": done}


def write_hook_dumps(
    folder: Path, traces: Iterable[RankTrace], taken_ns: int, backend: str = "nccl2", completions: bool = True
) -> Path:
    """trace_0, trace_1, … as they were `taken_ns`."""
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        path = folder / f"trace_{trace.header.rank}"
        path.write_bytes(pickle.dumps(hook_dump(trace, backend, completions), protocol=2))
        os.utime(path, ns=(taken_ns, taken_ns))
    return folder
