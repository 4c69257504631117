"""Of large jobs only the newest calls are read: the same calls as the end of a whole reading, and the same verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.box_files import box_bytes

from allranks.cli import main
from allranks.diagnosis import verdict
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import State

from .test_blackbox import make_trace


def write(
    folder: Path, ranks: int = 4, first: int = 0, last: int = 0, attempt: int = 2, finished: bool = False
) -> None:
    """Boxes of an attempt; rank 3 lacks the `last` calls and has finished the one before, or not."""
    for rank in range(ranks):
        trace = make_trace(rank, 600 - (last if rank == 3 else 0), first)
        trace.calls["state"][-1] = State.COMPLETED if finished and rank == 3 else State.STARTED
        trace = replace(trace, header=replace(trace.header, attempt=attempt))
        trace = replace(trace, progress=replace(trace.progress, closed=""))
        (folder / f"x.a{attempt}.r{rank}.p77.box").write_bytes(box_bytes(trace))


@pytest.mark.parametrize("first", [0, 1, 63, 300, 536, 599, 600, 12_345])
def test_the_newest_calls_are_the_end_of_all_calls(first: int, tmp_path: Path) -> None:
    """Wherever the ring begins."""
    write(tmp_path, first=first)
    whole = load_paths([str(tmp_path)]).traces
    newest = load_paths([str(tmp_path)], LoadOptions(newest_calls=4 * 100)).traces
    for one, all_of_it in zip(newest, whole, strict=True):
        assert (one.calls == all_of_it.calls[-100:]).all()
        assert (one.older, all_of_it.older) == (500, 0)
        assert one.header == all_of_it.header and one.torn == all_of_it.torn == 0


@pytest.mark.parametrize("calls", [4 * 600, 4 * 540])
def test_boxes_that_hold_hardly_more_are_read_whole(calls: int, tmp_path: Path) -> None:
    write(tmp_path)
    assert [
        (len(t.calls), t.older) for t in load_paths([str(tmp_path)], LoadOptions(newest_calls=calls)).traces
    ] == [(600, 0)] * 4


def test_everything_is_read_when_not_every_file_counts(tmp_path: Path) -> None:
    """As many calls of each rank as the diagnosis examines: how many ranks there are is known behind the reading."""
    write(tmp_path, attempt=1)
    write(tmp_path)
    traces = load_paths([str(tmp_path)], LoadOptions(newest_calls=8 * 100)).traces
    assert [(len(t.calls), t.older) for t in traces] == [(600, 0)] * 4


@pytest.mark.parametrize("finished", [True, False])
def test_the_verdict_is_that_of_all_calls(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the newest calls do not settle it and the older ones have to be read."""
    write(tmp_path, last=1, finished=finished)
    monkeypatch.setattr(verdict, "LARGE_JOB", 4 * 130)
    said = []
    for more in ([], ["--html", str(tmp_path.with_suffix(".html"))]):  # a page shows all calls
        assert main(["diagnose", str(tmp_path), "--json", *more]) == 1
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] and said[0]["verdict"]["ranks"] == [3]
    assert ("130 calls" in str(said[0]["summary"])) == finished
