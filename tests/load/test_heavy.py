"""Small files that unfold: they are refused or cut at a bound, in a process that may take 1.5 GB."""

from __future__ import annotations

import gzip
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.load import load_paths

from .dumps import dump, entry

SIZE = 48 << 20
HEAD = b'{"version":"2.10","pg_config":{},"entries":['


def shared_frames() -> bytes:
    """Every call has one and the same list of frames, of 200,000."""
    frames = [{"name": "f", "filename": "x", "line": line} for line in range(200_000)]
    return pickle.dumps(dump([entry(i, i, frames=frames) for i in range(1, 20_001)]), protocol=2)


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "marks": (lambda: b"\x80\x02" + b"(" * SIZE + b".", "damaged at byte"),
    "copies of the top": (lambda: b"\x80\x02]" + b"2" * SIZE + b".", "damaged at byte"),
    "dictionaries": (lambda: b"\x80\x02" + b"}" * SIZE + b".", "more than 4,000,000 lists and dictionaries"),
    "nothing": (lambda: b"\x80\x02" + b"N" * SIZE + b".", "not a flight recorder dump"),
    "objects of JSON": (
        lambda: HEAD + b"{}," * (SIZE // 3) + b"{}]}",
        "more than 4,000,000 lists and objects",
    ),
    "shared frames": (shared_frames, "nothing wrong"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_unfolds_is_bounded(name: str, tmp_path: Path) -> None:
    make, answer = BOMBS[name]
    for rank in (0, 1):
        (tmp_path / f"trace_{rank}.gz").write_bytes(gzip.compress(make(), 1))
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "diagnose", str(tmp_path)],
        capture_output=True, text=True, timeout=300, preexec_fn=limit_memory,
    )  # fmt: skip
    assert answer in done.stdout + done.stderr, done


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (3 << 29, 3 << 29))


def test_more_groups_than_any_job_has_are_left_out_with_a_note(tmp_path: Path) -> None:
    entries = [entry(i, i, process_group=(f"g{i}", f"d{i}")) for i in range(1, 3_001)]
    (tmp_path / "trace_0").write_bytes(pickle.dumps(dump(entries), protocol=2))
    (trace,) = load_paths([str(tmp_path)]).traces
    assert len(trace.groups) == 2_001
    assert "more than 2,000 groups: calls of the others are skipped" in trace.notes
