"""Real NCCL dumps of planted faults: four ranks on one H200, torch 2.11, dumped from a side thread while the job hung.

`nccl_h200/CASE/truth.json` says what was planted; ACCEPTED what the dumps alone can tell where that is less.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis

CASES = Path(__file__).parent / "nccl_h200"
NAMES = sorted(path.name for path in CASES.iterdir())
OK: tuple[str, tuple[int, ...]] = ("ok", ())

# Where the dumps cannot show what was planted.
ACCEPTED: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "p2p_no_recv": (("missing_rank", (0, 1)),),  # a first send blocks before NCCL records it
    "root_mismatch": (OK,),  # NCCL completed the broadcast, and records no roots
    "straggler": (OK,),  # a warning: everything finishes
}


def _copied(name: str, tmp_path: Path) -> Path:
    """A copy whose file times say nothing, so that the answer does not depend on the checkout."""
    copy = tmp_path / "dumps"
    shutil.copytree(CASES / name / "dumps", copy)
    for path in copy.iterdir():
        os.utime(path, (0, 0))
    return copy


def _change(folder: Path, rank: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Rewrites the entries of one rank's dump."""
    path = folder / f"trace_{rank}"
    dump = pickle.loads(path.read_bytes())
    change(dump["entries"])
    path.write_bytes(pickle.dumps(dump, protocol=2))
    os.utime(path, (0, 0))


def _diagnose(folder: Path) -> Diagnosis:
    loaded = load_paths([str(folder)])
    return diagnose(loaded.traces, loaded.files)


def _answer(result: Diagnosis) -> tuple[str, tuple[int, ...]]:
    if result.verdict is None:
        return result.status, ()
    return result.verdict.cause, result.verdict.ranks


def _accepted(name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    truth = json.loads((CASES / name / "truth.json").read_text())
    return ACCEPTED.get(name, ((truth["verdict"], tuple(truth["culprits"])),))


def test_the_planted_jobs_are_all_there() -> None:
    """An emptied folder would pass every other test."""
    assert len(NAMES) == 24
    assert set(ACCEPTED) < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_nccl_fault_gets_the_right_verdict(name: str, tmp_path: Path) -> None:
    """Cause and guilty ranks are those planted, or all that the dumps can tell; what is found is a fault for sure."""
    result = _diagnose(_copied(name, tmp_path))
    answer = _answer(result)
    assert answer in _accepted(name)
    assert result.status == ("ok" if answer == OK else "fault")


def test_what_nccl_did_not_record_is_named_as_missing_evidence(tmp_path: Path) -> None:
    """Two ranks lack together, one of them in a first send that is not in the dump: only stacks tell which."""
    verdict = _diagnose(_copied("p2p_no_recv", tmp_path)).verdict
    assert verdict is not None
    assert any("stacks" in text and "first send or receive" in text for text in verdict.missing_evidence)


def test_a_completion_that_is_not_believed_is_named(tmp_path: Path) -> None:
    """The reader finds "completed" in the dump and must be told why it does not count."""
    verdict = _diagnose(_copied("coalesced", tmp_path)).verdict
    assert verdict is not None
    assert any("marked completed" in text for text in verdict.evidence)


def test_a_coalesced_call_is_unclear_when_the_late_dump_may_be_older(tmp_path: Path) -> None:
    """Nothing in the late rank's file is newer than the others' completion: suspected, but not accused."""
    folder = _copied("coalesced", tmp_path)
    for rank in (1, 2, 3):
        _change(folder, rank, _complete_much_later)
    result = _diagnose(folder)
    assert (result.status, _answer(result)) == ("unclear", ("missing_rank", (0,)))


def test_a_late_dump_is_innocent_once_the_others_have_gone_on(tmp_path: Path) -> None:
    """An ordinary collective behind the coalesced one ended, so everybody entered both: that dump is older."""
    folder = _copied("coalesced", tmp_path)
    for rank in (1, 2, 3):
        _change(folder, rank, _go_on)
    assert _answer(_diagnose(folder)) == OK


def test_a_late_dump_is_innocent_once_the_others_have_made_more_coalesced_calls(tmp_path: Path) -> None:
    """The others do not stand in the call that the older dump lacks."""
    folder = _copied("coalesced", tmp_path)
    for rank in (1, 2, 3):
        _change(folder, rank, _complete_much_later)
        _change(folder, rank, _another_coalesced)
    assert _answer(_diagnose(folder)) == OK


def test_matched_parts_of_a_chain_of_batches_follow_from_the_one_that_lacks(tmp_path: Path) -> None:
    """Only the sleeping rank is a root; the batches around it are reported as consequences."""
    result = _diagnose(_copied("batch_missing", tmp_path))
    roots = [finding.ranks for finding in result.findings if finding.severity == "root"]
    assert roots == [(2,)]
    assert any(finding.severity == "consequence" for finding in result.findings)


def test_a_batch_that_ended_just_before_the_dump_is_no_hang(tmp_path: Path) -> None:
    """One rank waited long for its partners and the watchdog has not put the batch away yet, but they are done."""
    folder = _copied("batch_ok", tmp_path)
    for rank in range(4):
        _change(folder, rank, _end_with_a_batch)
    _change(folder, 0, _just_ended)
    loaded = load_paths([str(folder)])
    assert "treated as unfinished" in next(note.note for note in loaded.files if note.rank == 0)
    assert _answer(_diagnose(folder)) == OK


def _end_with_a_batch(entries: list[dict[str, Any]]) -> None:
    last = max(i for i, entry in enumerate(entries) if entry["profiling_name"] == "nccl:coalesced")
    del entries[last + 1 :]


def _just_ended(entries: list[dict[str, Any]]) -> None:
    entries[-1].update(
        retired=False, time_discovered_completed_ns=entries[-1]["time_created_ns"] + 3_000_000_000
    )


def _complete_much_later(entries: list[dict[str, Any]]) -> None:
    for entry in entries[-2:]:
        entry["time_discovered_completed_ns"] += 5_000_000_000


def _go_on(entries: list[dict[str, Any]]) -> None:
    """One all_reduce more, done."""
    entries.append(dict(entries[2], record_id=len(entries), collective_seq_id=6, op_id=6,
                        time_created_ns=entries[-1]["time_created_ns"] + 1_000_000))  # fmt: skip


def _another_coalesced(entries: list[dict[str, Any]]) -> None:
    for entry in entries[-2:]:
        entries.append(dict(entry, record_id=len(entries), collective_seq_id=6, op_id=6))
