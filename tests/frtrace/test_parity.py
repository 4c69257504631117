"""What `allranks frtrace` prints beside what torchfrtrace and `diagnose` say."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import main

from .test_frtrace import CASES, frtrace


def _event(
    name: str, seq: int = 1, sizes: Any = ([[4, 4]], [[4, 4]]), state: str = "started", **more: Any
) -> dict[str, Any]:
    return {
        "profiling_name": f"nccl:{name}", "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "time_created_ns": 1_000_000_000 * seq,
        "input_sizes": sizes[0], "output_sizes": sizes[1], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
        "state": state, "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": name[:4] in ("send", "recv"),
        "time_discovered_started_ns": None, "time_discovered_completed_ns": 1_000_000_000 * seq + 5 if state == "completed" else None,
        "frames": [{"name": "step", "filename": "train.py", "line": 7}], **more,
    }  # fmt: skip


def _write(folder: Path, entries: dict[int, list[dict[str, Any]]]) -> str:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(sorted(entries))}}
    for rank, events in entries.items():
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": events}
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return str(folder)


def test_the_first_finding_of_a_group_is_printed_and_capped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What follows in the same group is a consequence; --mismatch_cap 0 leaves one line."""
    small = ([[2, 2]], [[2, 2]])
    common = [_event("all_reduce", 1, state="completed")]
    one = [_event("all_reduce", 2), _event("broadcast", 3)]
    two = [_event("all_reduce", 2, small), _event("all_reduce", 3)]
    folder = _write(tmp_path, {0: common + one, 1: [dict(e) for e in common + one], 2: common + two})
    code, lines = frtrace(capsys, folder)
    assert code == 0
    assert [line for line in lines if "sequence number" in line or line.startswith("error")] == [
        "Collective sequence number: 2 has errors",
        "error msg: Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[4, 4]]' does not match "
        "found input sizes: '[[2, 2]]'",
    ]
    _, lines = frtrace(capsys, folder, "--mismatch_cap", "0")
    assert lines == ["Too many mismatches for process_group 0: default_pg aborting"]


def test_the_culprit_is_the_rank_that_diagnose_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of two ranks that disagree the one that breaks with its own habit, not the one that comes second."""
    usual = [_event("all_reduce", seq, state="completed") for seq in range(1, 9)]
    odd = _event("all_reduce", 9, ([[2, 2]], [[2, 2]]))
    folder = _write(tmp_path, {0: [*usual, odd], 1: [*usual, _event("all_reduce", 9)]})
    main(["diagnose", folder, "--json"])
    assert '"ranks": [0]' in capsys.readouterr().out.replace("\n", "").replace("  ", "")
    _, lines = frtrace(capsys, folder)
    assert any(line.startswith("error msg: Culprit rank 0;") for line in lines)


@pytest.mark.parametrize(
    ("words", "named", "known"),
    [(("--selected-ranks", "0", "9"), "rank 9", "0, 1"), (("--pg-filters", "tp"), "group tp", "default_pg")],
)
def test_a_filter_that_matches_nothing_is_an_error(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str, known: str
) -> None:
    """Exit 2 with the names that there are: silence would read as "nothing wrong"."""
    for more in ((), ("-j",)):
        code, lines = frtrace(capsys, str(CASES / "broken_dumps/ring_skew_hang"), *words, *more)
        assert code == 2
        assert any(named in line for line in lines) and any(known in line for line in lines)
