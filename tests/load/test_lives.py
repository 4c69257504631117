"""Boxes of replicas that were restarted one by one: every rank's newest life belongs to the same job."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allranks.blackbox.file_writer import box_bytes
from allranks.blackbox.layout import file_name
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import CALL, Group, Progress, RankTrace, TraceHeader

SECOND, START = 10**9, 10**18


def life(folder: Path, rank: int, attempt: int, begin_s: int, end_s: int, group: str = "") -> None:
    """A box of a rank that lived from `begin_s` to `end_s`."""
    calls = np.zeros(1, CALL)
    calls["begin"] = calls["end"] = 1
    calls["created_ns"] = START + begin_s * SECOND
    header = TraceHeader(
        rank=rank, world_size=2, pid=100 + 10 * attempt + rank, attempt=attempt, start_ns=START + begin_s * SECOND
    )  # fmt: skip
    progress = Progress(step=end_s, step_ns=START + end_s * SECOND)
    trace = RankTrace(header, calls, groups=(Group(""), Group(group)), progress=progress)
    (folder / file_name("job", attempt, rank, header.pid)).write_bytes(box_bytes(trace))


def steps(folder: Path, attempt: int | None = None) -> dict[int, int]:
    """Rank -> last step of the life that was chosen."""
    result = load_paths([str(folder)], LoadOptions(attempt=attempt))
    return {trace.header.rank or 0: trace.progress.step for trace in result.traces}


def test_a_replica_restarted_by_itself_is_read_beside_the_others(tmp_path: Path) -> None:
    """Rank 0 trains from 0 to 60; rank 1 died at 20 and came back at 30. Both newest lives count."""
    life(tmp_path, 0, 0, 0, 60)
    life(tmp_path, 1, 0, 0, 20)
    life(tmp_path, 1, 1, 30, 50)
    assert steps(tmp_path) == {0: 60, 1: 50}
    notes = [note.note for note in load_paths([str(tmp_path)]).files if note.status == "skipped"]
    assert notes == ["of an earlier process of rank 1, which was restarted by itself"]
    assert steps(tmp_path, attempt=0) == {0: 60, 1: 20}


def test_a_restart_of_the_whole_job_leaves_the_old_attempt_out(tmp_path: Path) -> None:
    """Everybody ended before anybody began again; rank 1 is gone for good."""
    life(tmp_path, 0, 0, 0, 20)
    life(tmp_path, 1, 0, 0, 20)
    life(tmp_path, 0, 1, 25, 60)
    assert steps(tmp_path) == {0: 60}


def test_a_replica_that_hangs_since_before_another_began_again_is_read_too(tmp_path: Path) -> None:
    """Nothing in the box of rank 0 is later than the new life of rank 1, for which it waits."""
    life(tmp_path, 0, 0, 0, 20, group="replicas/2")
    life(tmp_path, 1, 0, 0, 20, group="replicas/1")
    life(tmp_path, 1, 1, 21, 22)
    assert steps(tmp_path) == {0: 20, 1: 22}
