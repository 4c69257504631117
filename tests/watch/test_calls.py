"""The agent's comparison of calls: read from black boxes, named once, at a bounded cost."""

from __future__ import annotations

import logging
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.drill.ranks import Ranks
from allranks.incidents.evidence import Observed
from allranks.incidents.folder import read_incidents
from allranks.incidents.judge import correct
from allranks.incidents.pipeline import IncidentPipeline, WatchOptions
from allranks.model.diagnosis import Diagnosis, Finding
from allranks.watch import calls as calls_module
from allranks.watch.calls import MAX_REPORTED, CallComparison, CallWindows, choose_windows, read_calls
from allranks.watch.samples import RankSample, read_samples
from diagnose.gallery_module import gallery

RECORDED = Path(__file__).parents[1] / "diagnose" / "recorded"


def boxes(name: str, folder: Path) -> list[RankSample]:
    """The black boxes of a recorded job."""
    with tarfile.open(RECORDED / f"{name}.tar.gz") as tar:
        for member in tar.getmembers():
            if member.name.endswith(".box"):
                data = tar.extractfile(member)
                assert data is not None
                (folder / Path(member.name).name).write_bytes(data.read())
    samples = read_samples(folder)
    assert len(samples) == 3
    return samples


def test_a_difference_is_named_once_when_two_samples_show_it(tmp_path: Path) -> None:
    """The first sample may have caught ranks between two calls."""
    samples, calls = boxes("different_operations", tmp_path), CallComparison()
    found = [calls.look(now, samples) for now in (100.0, 110.0, 119.0)]
    assert [finding is not None for finding in found] == [False, True, False]
    assert found[1] is not None and (found[1].cause, found[1].ranks) == ("type_mismatch", (2,))


def test_samples_that_come_too_fast_and_ranks_that_do_not_move_are_not_compared(tmp_path: Path) -> None:
    """The cost is bounded, and a hang that lasts for hours costs nothing."""
    samples, calls = boxes("different_operations", tmp_path), CallComparison()
    assert [calls.look(now, samples) for now in (100.0, 100.1, 1000.0, 2000.0)] == [None] * 4


@pytest.mark.parametrize("change", [{"attempt": 1}, {"alive": True, "start_ns": 1 << 62}])
def test_ranks_of_an_earlier_run_are_not_compared(tmp_path: Path, change: dict[str, int]) -> None:
    """After a restart the boxes of ranks that have not come again are still there."""
    samples, calls = boxes("different_operations", tmp_path), CallComparison()
    samples[2] = replace(samples[2], **change)  # type: ignore[arg-type]
    assert [calls.look(now, samples) for now in (100.0, 110.0, 115.0)] == [None] * 3


def test_a_healthy_job_has_no_difference(tmp_path: Path) -> None:
    """Several groups and threads."""
    samples, calls = boxes("ok_pipeline", tmp_path), CallComparison()
    assert len(read_calls([sample.path for sample in samples])) == 3
    assert [calls.look(now, samples) for now in (100.0, 105.0, 110.0)] == [None] * 3


def test_a_difference_of_a_running_job_is_named(tmp_path: Path) -> None:
    """Real ranks: one skips a step, and what it does next still fits what the others do."""
    pytest.importorskip("torch")
    gallery.preload()
    case, calls = gallery.truth()["nan_skip"], CallComparison()
    env = {"ALLRANKS_DIR": str(tmp_path)}
    found, deadline = None, time.monotonic() + 60.0
    with Ranks(gallery._rank, case.processes, args=(str(case.script),), backend=None, env=env):
        while found is None and time.monotonic() < deadline:
            found = calls.look(time.monotonic(), read_samples(tmp_path))
            time.sleep(0.05)
    assert found is not None and (found.cause, found.ranks) == ("missing_rank", case.ranks)


@pytest.mark.parametrize(("name", "same"), [("ok_training", True), ("different_operations", False)])
def test_nodes_tell_the_same_hashes_while_their_ranks_make_the_same_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, same: bool
) -> None:
    """One node has ranks 0 and 1, the other rank 2; a group that is all on one node is not told."""
    monkeypatch.setattr(calls_module, "WINDOW", 1)
    traces = read_calls([sample.path for sample in boxes(name, tmp_path)])
    here, there, everybody = CallWindows(), CallWindows(), CallWindows()
    here.note(1.0, traces[:2])
    there.note(1.0, traces[2:])
    everybody.note(1.0, traces)
    assert here.hashes and not everybody.hashes
    common = [(key, w) for key in here.hashes for w in here.hashes[key] if w in there.hashes.get(key, ())]
    assert len(common) > 2
    assert all(here.hashes[key][w] == there.hashes[key][w] for key, w in common) == same


def test_nodes_that_look_at_different_times_choose_the_same_windows() -> None:
    """Round numbers are in both."""
    first, second = ({w: w for w in range(begin, begin + 60)} for begin in (1000, 1030))
    assert set(choose_windows(first)) & set(choose_windows(second))


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """A box that was removed, and one that is none."""
    (tmp_path / "x.box").write_bytes(b"no box")
    assert read_calls([str(tmp_path / "gone.box"), str(tmp_path / "x.box")]) == []
    assert MAX_REPORTED > 0


def test_the_incident_that_follows_tells_of_the_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when it is seen, a moment in the story, and the cause where the calls behind it only hang."""
    finding = Finding(
        "size_mismatch", (2,), "rank 2 called all_reduce with 3, where ranks 0, 1 had 4", confidence=0.9
    )
    pipeline = IncidentPipeline(WatchOptions(tmp_path, tmp_path / "incidents", "job"))
    with caplog.at_level(logging.WARNING):
        pipeline.note_divergence(finding)
    assert "with 3, where ranks 0, 1 had 4\n" in caplog.text
    pipeline.open("hang", "silent", [])
    (story,) = read_incidents(tmp_path / "incidents")
    assert [moment["text"] for moment in story["timeline"] if moment["name"] == "calls differ"] == [
        finding.sentence
    ]
    hang = Diagnosis("fault", Finding("none_finished", (0, 1, 2), "", confidence=0.7))
    result = correct(hang, None, Observed(diverged=finding))
    assert result is not None and result.verdict is not None and result.verdict.cause == "size_mismatch"
