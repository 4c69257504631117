"""Which job a run is, and that the black boxes of an earlier run of that name are not taken for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli.run import _incidents, find_job_name, may_have_several_nodes
from allranks.incidents import job_overview
from allranks.incidents.job_overview import set_aside_earlier, write_job
from allranks.watch.samples import RankSample, read_sample, read_samples
from boxes import write_box

FILE = {"elastic": {"rdzv_id": "elastic-training", "rdzv_endpoint": ""}}


def test_a_job_is_named_by_whoever_says_it_most_plainly() -> None:
    """Flag, environment, rendezvous; the default of a job file is not a name when nodes do not meet."""
    flags = ["--rdzv-id", "meeting"]
    outside = {"ALLRANKS_JOB_ID": "outside"}
    assert find_job_name("mine", outside, flags, {}, "train.py") == "mine"
    assert find_job_name("größe", {}, [], {}, "train.py") == "größe"
    assert find_job_name("j\udcc3\udcb6b", {}, [], {}, "train.py") == "j??b"  # as argv has it in the C locale
    assert find_job_name(None, outside, flags, {}, "train.py") == "outside"
    assert find_job_name(None, {}, flags, {}, "train.py") == "meeting"
    assert find_job_name(None, {}, [], {"elastic": {"rdzv_id": "r7"}}, "train.py") == "r7"
    assert find_job_name(None, {}, [], FILE, "x/train.py").startswith("train-")
    several = {"elastic": {"rdzv_id": "elastic-training", "rdzv_endpoint": "head:29400"}}
    assert find_job_name(None, {}, [], several, "train.py") == "elastic-training"


def gone() -> int:
    """The pid of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_boxes_of_an_earlier_run_of_the_same_name_are_set_aside(tmp_path: Path) -> None:
    """Four ranks died with their agent; the next run has two: ranks 2 and 3 are nobody's. Nothing is lost."""
    write_job(tmp_path, {"pid": gone()})
    for rank in range(4):
        write_box(tmp_path, rank, 7, pid=gone())
    write_box(tmp_path, 4, 7)  # its process lives
    set_aside_earlier(tmp_path)
    assert [sample.rank for sample in read_samples(tmp_path)] == [4]
    assert len(list(tmp_path.glob("*.box.earlier"))) == 4


def test_boxes_stay_while_another_agent_of_the_job_runs(tmp_path: Path) -> None:
    """Two agents of one job on a machine share the folder: the death of a rank is evidence of the other's."""
    write_job(tmp_path, {"pid": os.getpid()})
    write_box(tmp_path, 0, 7, pid=gone())
    set_aside_earlier(tmp_path)
    assert [sample.rank for sample in read_samples(tmp_path)] == [0]


def test_two_agents_that_start_together_set_aside_what_an_earlier_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is faster with one of the boxes."""
    for rank in range(2):
        write_box(tmp_path, rank, 7, pid=gone())

    def read(path: Path) -> RankSample | None:
        found = read_sample(path)
        (tmp_path / "0.box").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(job_overview, "read_sample", read)
    set_aside_earlier(tmp_path)
    assert [path.name for path in tmp_path.glob("*.earlier")] == ["1.box.earlier"]


@pytest.mark.parametrize(
    ("words", "several"),
    [
        (["--standalone"], False),
        (["--nnodes", "1"], False),
        (["--nnodes=1:1"], False),
        (["--nnodes", "2"], True),
        (["--nnodes=1:4"], True),
    ],
)
def test_a_job_that_may_have_several_nodes_is_told_from_one_of_this_node(
    words: list[str], several: bool
) -> None:
    """Without a common lighthouse each of them judges its own ranks, and `allranks run` says so."""
    assert may_have_several_nodes(words) is several


def test_incidents_go_beside_the_black_boxes_where_the_wanted_folder_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job is often started in a folder that only others may write to: that is said at the start, not after a death."""
    (tmp_path / "file").touch()
    wanted, boxes = tmp_path / "new" / "incidents", tmp_path / "boxes"
    assert _incidents(wanted, boxes) == wanted and not capfd.readouterr().err
    assert _incidents(tmp_path / "file" / "incidents", boxes) == boxes / "incidents"
    said = "".join(capfd.readouterr())
    assert str(tmp_path / "file") in said and str(boxes / "incidents") in said and "--incidents" in said


@pytest.mark.needs_root
@pytest.mark.parametrize("made", ["a folder", "a link", "a link to nothing"])
def test_incidents_do_not_go_to_a_folder_that_another_user_made_before(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """He could put a link in place of a file that is to be written, also where --incidents names the folder."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "allranks-incidents"
    theirs.mkdir(mode=0o777) if made == "a folder" else theirs.symlink_to(
        "/nowhere" if "nothing" in made else tmp_path
    )
    os.lchown(theirs, 4242, 4242)
    assert _incidents(None, tmp_path / "boxes") == tmp_path / "boxes" / "incidents"
    assert f"{theirs} belongs to another user" in "".join(capfd.readouterr())
    assert _incidents(theirs, tmp_path / "boxes") == tmp_path / "boxes" / "incidents"
    assert _incidents(theirs / "mine", tmp_path / "boxes") == tmp_path / "boxes" / "incidents"
    assert "belongs to another user" in "".join(capfd.readouterr())


@pytest.mark.needs_root
def test_incidents_of_root_do_not_go_below_a_folder_that_others_can_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder above could put another one in its place while the job runs."""
    shared = tmp_path / "shared"
    (shared / "project").mkdir(parents=True)
    monkeypatch.chdir(shared / "project")
    assert _incidents(None, tmp_path / "boxes") == Path("allranks-incidents")
    os.chown(shared, 4242, 4242)
    assert _incidents(None, tmp_path / "boxes") == tmp_path / "boxes" / "incidents"
    os.chown(shared, 0, 0)
    shared.chmod(0o777)
    assert _incidents(None, tmp_path / "boxes") == tmp_path / "boxes" / "incidents"


def test_the_folder_of_incidents_is_made_at_once_where_others_could_make_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it is made with the first incident."""
    monkeypatch.chdir(tmp_path)
    folder = _incidents(None, tmp_path / "boxes")
    assert not folder.exists()
    tmp_path.chmod(0o1777)
    assert _incidents(None, tmp_path / "boxes") == folder and folder.is_dir()
