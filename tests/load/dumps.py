"""Builds torch dumps for the tests, as plain dictionaries with the keys that torch writes."""

from __future__ import annotations

import struct
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


def torch_pickle(content: object) -> bytes:
    """A dump as torch::jit::Pickler writes it: text and frames through the memo, everything else as it is."""
    memo: dict[object, int] = {}
    return b"\x80\x02" + _torch_pickled(content, memo) + b"."


def _torch_pickled(value: Any, memo: dict[object, int]) -> bytes:
    key = tuple(value.items()) if isinstance(value, dict) and "filename" in value else value
    if isinstance(value, str) or key is not value:
        if key in memo:
            return b"h%c" % memo[key] if memo[key] < 256 else b"j" + struct.pack("<I", memo[key])
        made = b"X" + struct.pack("<I", len(value.encode())) + value.encode() if key is value else b""
        made = made or _torch_dict(value, memo)
        memo[key] = number = len(memo)
        return made + (b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number))
    if isinstance(value, dict):
        return _torch_dict(value, memo)
    if isinstance(value, (list, tuple)):
        items = b"".join(_torch_pickled(item, memo) for item in value)
        return b"](" + items + b"e" if isinstance(value, list) else b"(" + items + b"t"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    sizes = ((0, 256, "<B", b"K"), (0, 1 << 16, "<H", b"M"), (-(1 << 31), 1 << 31, "<i", b"J"))
    found = next((each for each in sizes if each[0] <= value < each[1]), (0, 0, "<q", b"\x8a\x08"))
    return found[3] + struct.pack(found[2], value)


def _torch_dict(value: dict[str, Any], memo: dict[object, int]) -> bytes:
    items = (_torch_pickled(item, memo) for pair in value.items() for item in pair)
    return b"}(" + b"".join(items) + b"u" if value else b"}"
