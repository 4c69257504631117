"""Boxes of replicas that were restarted one by one: every rank's newest life belongs to the same job."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.box_files import box_bytes

from allranks.blackbox.layout import file_name
from allranks.blackbox.reader import read_trace
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import CALL, Group, Progress, RankTrace, TraceHeader

from .dumps import dump, entry

SECOND, START = 10**9, 10**18


def life(
    folder: Path, rank: int, attempt: int, begin_s: int, end_s: int, group: str = "", job: str = "job"
) -> None:
    """A box of a rank that lived from `begin_s` to `end_s`."""
    calls = np.zeros(1, CALL)
    calls["begin"] = calls["end"] = 1
    calls["created_ns"] = START + begin_s * SECOND
    header = TraceHeader(
        rank=rank, world_size=2, pid=100 + 10 * attempt + rank, job=job, attempt=attempt, start_ns=START + begin_s * SECOND
    )  # fmt: skip
    progress = Progress(step=end_s, step_ns=START + end_s * SECOND)
    trace = RankTrace(header, calls, groups=(Group(""), Group(group)), progress=progress)
    (folder / file_name(job, attempt, rank, header.pid)).write_bytes(box_bytes(trace))


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
    assert notes == ["from an earlier process of rank 1, which was restarted individually"]
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


def test_boxes_of_two_jobs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    """Somebody copied all of a node: the older job has a rank more, which is not one of the newer."""
    for rank in range(3):
        life(tmp_path, rank, 0, 0, 20, job="yesterday")
    for rank in range(2):
        life(tmp_path, rank, 0, 30, 60, job="today")
    assert steps(tmp_path) == {0: 60, 1: 60}
    notes = {note.note for note in load_paths([str(tmp_path)]).files if note.status == "skipped"}
    assert notes == {"belongs to job yesterday, but job today is newer: give the files of one job"}


def test_boxes_of_ranks_that_do_not_repeat_belong_together_whatever_their_job_is_called(
    tmp_path: Path,
) -> None:
    """Nodes that were started by hand may have named it differently."""
    for rank in range(4):
        life(tmp_path, rank, 0, 0, 20, job=f"node{rank // 2}")
    assert sorted(steps(tmp_path)) == [0, 1, 2, 3]


def test_dumps_of_two_jobs_with_other_ranks_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    """torch's dumps do not name their job; their groups differ. A copy of a file is not a job."""
    for rank in range(4):
        (tmp_path / f"a_trace_{rank}").write_bytes(pickle.dumps(dump([entry(1)], "[0, 1, 2, 3]")))
    for name in ("b_trace_0", "b_trace_1", "b_trace_1 (1)"):
        (tmp_path / name).write_bytes(pickle.dumps(dump([entry(9)], "[0, 1]")))
    result = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in result.traces] == [0, 1]
    assert sum("belongs to ranks 0-3, but ranks 0-1 is newer" in note.note for note in result.files) == 4


@pytest.mark.parametrize(("world", "ranks"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (0, [0, 1, 2, 3])])
def test_boxes_of_one_job_and_dumps_of_a_larger_one_are_not_mixed(
    tmp_path: Path, world: int, ranks: list[int]
) -> None:
    """The boxes are newer. Of a job that has as many ranks as the dumps, or does not say, they belong together."""
    for rank in range(4):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump([entry(1)], "[0, 1, 2, 3]")))
    box = read_trace(Path(__file__).parents[1] / "record" / "cases" / "mixed_calls.r0.box")
    for rank in range(2):
        header = replace(box.header, rank=rank, world_size=world, job="mine")
        groups = tuple(replace(group, ranks=(0, 1)) if group.name else group for group in box.groups)
        path = tmp_path / f"mine.a0.r{rank}.p{7 + rank}.box"
        path.write_bytes(box_bytes(replace(box, header=header, groups=groups)))
    result = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in result.traces] == ranks
    told = sum("the black boxes are from a job of 2 ranks" in note.note for note in result.files)
    assert told == (4 if world == 2 else 0)
