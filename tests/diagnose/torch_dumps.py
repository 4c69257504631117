"""Writes dump files as torch does, pickles of plain dictionaries, one per rank; and what is found in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis

Entry = dict[str, Any]
BASE_NS = 10**18


def entry(
    op: str = "all_reduce", seq: int = 1, *, record: int = 0, group: tuple[str, str] = ("0", "default_pg"),
    state: str = "completed", sizes: list[list[int]] | None = None, out: list[list[int]] | None = None,
    dtype: str = "Float", lib: str = "nccl", p2p_seq: int = 0, is_p2p: bool = False, line: int = 10,
    retired: bool | None = None, file: str = "train.py",
) -> Entry:  # fmt: skip
    """One call. `state` "completed", "started" or "scheduled"."""
    sizes = [[4, 4]] if sizes is None else sizes
    out = sizes if out is None else out
    done = state == "completed"
    return {
        "frames": [{"name": "f", "filename": file, "line": line}], "record_id": record, "pg_id": 0,
        "process_group": group, "thread_id": "1", "thread_name": "t", "collective_seq_id": seq, "p2p_seq_id": p2p_seq,
        "op_id": record, "profiling_name": f"{lib}:{op}", "time_created_ns": BASE_NS + record * 1000,
        "input_sizes": sizes, "input_dtypes": [dtype] * len(sizes), "output_sizes": out,
        "output_dtypes": [dtype] * len(out), "state": state, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": BASE_NS + record * 1000 + 500 if done else None,
        "retired": done if retired is None else retired, "timeout_ms": 600000, "is_p2p": is_p2p,
    }  # fmt: skip


def number(entries: list[Entry], first: int = 0) -> list[Entry]:
    """The entries with ascending record ids."""
    return [
        {**e, "record_id": first + i, "op_id": first + i, "time_created_ns": BASE_NS + (first + i) * 1000}
        for i, e in enumerate(entries)
    ]


def write(
    folder: Path, ranks: dict[int, list[Entry]], groups: dict[str, tuple[str, list[int]]] | None = None,
    version: str | dict[int, str] = "2.10",
) -> Path:  # fmt: skip
    """trace_0, trace_1, ... `groups` is name → (description, members); default: one group of all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = groups or {"0": ("default_pg", sorted(ranks))}
    for rank, entries in ranks.items():
        config = {
            name: {"name": name, "desc": desc, "ranks": str(members)}
            for name, (desc, members) in groups.items()
            if rank in members
        }
        dump = {
            "version": version if isinstance(version, str) else version[rank], "pg_config": config,
            "comm_lib_version": "2.27", "pg_status": {}, "entries": entries,
        }  # fmt: skip
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return folder


def diagnose_folder(folder: Path) -> Diagnosis:
    loaded = load_paths([str(folder)])
    return diagnose(loaded.traces, loaded.files)


def answer(result: Diagnosis) -> tuple[str, tuple[int, ...]] | None:
    return None if result.verdict is None else (result.verdict.cause, result.verdict.ranks)


def reduces(first: int, last: int, state: str = "completed", **more: object) -> list[Entry]:
    done = [entry(seq=seq, **more) for seq in range(first, last)]  # type: ignore[arg-type]
    return [*done, entry(seq=last, state=state, **more)]  # type: ignore[arg-type]
