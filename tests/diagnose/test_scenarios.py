"""Recorded jobs with a known truth: the verdict, and the whole report line by line.

`cases/NAME/expected.txt` is the full text. After a change of wording rewrite all of them with
`ALLRANKS_REWRITE=1 pytest tests/diagnose/test_scenarios.py` and review the diff.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis
from allranks.report.text import render

CASES = Path(__file__).parent / "cases"

# case → (cause, guilty ranks, group, sequence); None: nothing is wrong.
TRUTH: dict[str, tuple[str, tuple[int, ...], str, int] | None] = {
    "broken_dumps_all_to_all_single_uneven": None,
    "broken_dumps_cascade": ("missing_rank", (3,), "tp1", 2),
    "broken_dumps_coalesced_pipeline": None,
    "broken_dumps_json_dump": None,
    "broken_dumps_p2p_in_big_group": None,
    "broken_dumps_ring_skew_hang": ("missing_rank", (1,), "default_pg", 70),
    "broken_dumps_truncated_file": None,
    "broken_dumps_unsafe_pickle": None,
    "flight_recorder_crash_seed_async": ("extra_collective", (0,), "default_pg", 4),
    "flight_recorder_different_types": ("type_mismatch", (2,), "default_pg", 5),
    "flight_recorder_missing_rank": ("missing_rank", (1,), "default_pg", 7),
    "flight_recorder_normal": None,
    "flight_recorder_rank_died": ("rank_died", (2,), "default_pg", 5),
    "flight_recorder_rank_stuck_in_python": ("missing_rank", (2,), "default_pg", 5),
    "flight_recorder_subgroup_hang": ("missing_rank", (3,), "tp_1", 5),
    "flight_recorder_wraparound": ("missing_rank", (2,), "default_pg", 22),
    "nccl_cascade": ("missing_rank", (3,), "tp_1", 4),
    "nccl_fsdp_stuck": ("missing_rank", (0,), "default_pg", 94),
    "nccl_missing_rank": ("missing_rank", (2,), "default_pg", 8),
    "nccl_pipeline_healthy": None,
}


def _diagnose(folder: Path, tmp_path: Path, part: str = "dumps") -> Diagnosis:
    """Diagnoses a copy whose file times say nothing, so that the answer does not depend on the checkout."""
    copy = tmp_path / "dumps"
    shutil.copytree(folder / part, copy)
    for path in copy.iterdir():
        os.utime(path, (0, 0))
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        loaded = load_paths(["dumps"])
    finally:
        os.chdir(here)
    return diagnose(loaded.traces, loaded.files)


def test_every_case_has_a_truth() -> None:
    """No recorded job is left out."""
    assert {path.name for path in CASES.iterdir()} == set(TRUTH)


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_a_recorded_job_gets_the_right_verdict(name: str, tmp_path: Path) -> None:
    """Cause, guilty ranks, group and sequence number are those of the truth."""
    result = _diagnose(CASES / name, tmp_path)
    truth = TRUTH[name]
    if truth is None:
        unsafe = name == "broken_dumps_unsafe_pickle"  # it would run code: not right, and nobody's fault
        assert (result.status, result.verdict) == ("unclear" if unsafe else "ok", None)
    else:
        assert result.verdict is not None
        assert result.status == "fault"
        verdict = result.verdict
        assert (verdict.cause, verdict.ranks, verdict.group, verdict.sequence) == truth


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_the_report_of_a_recorded_job_reads_as_reviewed(name: str, tmp_path: Path) -> None:
    """The whole text is as it was when somebody last read it."""
    lines = list(render(_diagnose(CASES / name, tmp_path)))
    expected = CASES / name / "expected.txt"
    if os.environ.get("ALLRANKS_REWRITE"):
        expected.write_text("\n".join(lines) + "\n")
    assert lines == expected.read_text().splitlines()


def test_json_of_the_same_job_gives_the_same_verdict(tmp_path: Path) -> None:
    """torch's JSON has no stacks, but the same calls."""
    result = _diagnose(CASES / "flight_recorder_subgroup_hang", tmp_path, "json")
    assert result.verdict is not None
    assert (result.verdict.cause, result.verdict.ranks) == ("missing_rank", (3,))
