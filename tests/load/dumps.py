"""Builds torch dumps for the tests, as plain dictionaries with the keys that torch writes."""

from __future__ import annotations

from typing import Any

FRAMES = [
    {"name": "train", "filename": "train.py", "line": 10},
    {"name": "main", "filename": "train.py", "line": 90},
]


def entry(record: int, seq: int = 1, op: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    """One entry; `changes` replace or add keys."""
    made: dict[str, Any] = {
        "frames": [dict(frame) for frame in FRAMES], "record_id": record, "pg_id": 0,
        "process_group": ("0", "default_pg"), "thread_name": "python", "thread_id": "140430093876096",
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": op,
        "time_created_ns": 1_700_000_000_000_000_000 + record * 1000, "input_sizes": [[4, 4]],
        "input_dtypes": ["Float"], "output_sizes": [[4, 4]], "output_dtypes": ["Float"], "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_000_000_500 + record * 1000,
        "retired": True, "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip
    made.update(changes)
    return made


def dump(
    entries: list[dict[str, Any]], ranks: str = "[0, 1]", version: str = "2.10", **changes: Any
) -> dict[str, Any]:
    """A whole dump around the entries."""
    made: dict[str, Any] = {
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "comm_lib_version": "2.28.9",
        "pg_status": {},
        "entries": entries,
    }
    made.update(changes)
    return made
