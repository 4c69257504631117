"""Dumps in two formats with stacks beside them: one attempt, and the stacks are used."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.load import LoadOptions, load_paths
from allranks.load.sources import unpack

CASE = Path(__file__).parent / "stacks_beside"


def test_the_same_dumps_in_two_formats_are_one_attempt_and_the_telling_one_wins() -> None:
    """Pickles hold stacks, JSON does not; both end at the same moment."""
    result = load_paths([str(CASE)], LoadOptions())
    assert [trace.kind.split()[1] for trace in result.traces] == ["pickle"] * 4


def test_tracebacks_beside_dumps_say_where_the_guilty_rank_is(capsys: pytest.CaptureFixture[str]) -> None:
    """stack_2.txt is what faulthandler wrote of rank 2."""
    assert main(["diagnose", str(CASE), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("stuck_before_collective", [2])
    assert verdict["where"] == "case.py:5 in slow_data_loader"


ALONE = Path(__file__).parents[1] / "stacks" / "cases" / "hangs"


@pytest.mark.parametrize(
    ("case", "cause", "ranks", "line"),
    [
        ("lock_deadlock_abba", "lock_deadlock", [0], "cases.py:90 in flush_checkpoint"),
        ("gloo_allreduce_missing_rank", "sleep", [2], "cases.py:13 in load_batch_slow_storage"),
        ("gil_c_ext_sleep", "gil_held_native", [0], "cases.py:109 in gil_c_ext_sleep"),
    ],
)
def test_a_folder_with_stacks_and_no_dump_is_judged_by_its_stacks(
    case: str, cause: str, ranks: list[int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same answer as `allranks stacks --from`, where a user has pointed `allranks diagnose` at it."""
    assert main(["diagnose", str(ALONE / case), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["cause"], verdict["ranks"], verdict["where"]) == (cause, ranks, line)


@pytest.mark.parametrize(
    ("case", "warned"), [("healthy", []), ("straggler_not_hung", [("slow", [1], "warning")])]
)
def test_stacks_of_ranks_that_move_on_are_no_fault(
    case: str, warned: list[tuple[str, list[int], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow rank is worth a warning. Nothing is said of calls, of which there are none."""
    assert main(["diagnose", str(ALONE / case), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["verdict"]) == ("ok", None)
    assert [(one["cause"], one["ranks"], one["severity"]) for one in found["findings"]] == warned
    main(["diagnose", str(ALONE / case)])
    assert capsys.readouterr().out.startswith("nothing wrong: the stacks show ranks that move on")


def test_a_rank_whose_stacks_cannot_be_read_is_not_accused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file was cut: all that is known is that it cannot be read."""
    name = "rank0.pyspy.s1.json"
    (tmp_path / name).write_bytes((ALONE / "lock_deadlock_abba" / name).read_bytes()[:200])
    assert main(["diagnose", str(tmp_path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["verdict"], found["findings"]) == ("unclear", None, [])


@pytest.mark.parametrize("form", ["gztar", "zip"])
def test_stacks_and_logs_inside_an_archive_are_read_as_those_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """People attach archives of whole incidents to tickets. Nothing is left behind."""
    folder = tmp_path / "hang"
    shutil.copytree(CASE, folder)
    (folder / "rank2.log").write_text("step 4\nstep 5\nRuntimeError: the disk is full\n")
    packed = shutil.make_archive(str(tmp_path / "ticket"), form, folder)
    unpacked_to = tmp_path / "temporary"
    unpacked_to.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(unpacked_to))
    answers = []
    for path in (str(folder), packed):
        assert main(["diagnose", path, "--json"]) == 1
        said = capsys.readouterr()
        assert said.err == ""
        answers.append(json.loads(said.out)["verdict"])
    assert answers[1]["where"] == "case.py:5 in slow_data_loader"
    assert "the log of rank 2 ends with: RuntimeError: the disk is full" in answers[1]["evidence"]
    assert answers[0] == answers[1]
    assert not any(unpacked_to.iterdir())


def test_without_room_for_the_stacks_of_an_archive_its_dumps_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No temporary folder, say."""
    packed = shutil.make_archive(str(tmp_path / "ticket"), "gztar", CASE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert main(["diagnose", packed, "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"]["ranks"] == [2]
    assert "left out: stacks and logs in archives: " in said.err


def test_hostile_names_in_an_archive_write_nowhere_else(tmp_path: Path) -> None:
    """Captures that would leave the folder are read below it."""
    packed, home = tmp_path / "hang.tar", tmp_path / "home"
    home.mkdir()
    with tarfile.open(packed, "w") as archive:
        for name in ("../../rank0.pyspy.s1.json", "/rank1.pyspy.s1.json", "a/../.."):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
    members = {
        f"{packed}/{name}" for name in ("../../rank0.pyspy.s1.json", "/rank1.pyspy.s1.json", "a/../..")
    }
    found = unpack(str(packed), str(packed), members, str(home))
    assert len(found) == 2
    assert all(Path(place).parent.parent == home for place in found.values())


def test_a_log_without_a_line_is_no_damage(tmp_path: Path) -> None:
    """An empty dump is."""
    for name in ("rank0.log", "trace_0"):
        (tmp_path / name).touch()
    notes = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True)).files
    assert {note.path: note.status for note in notes} == {"rank0.log": "skipped", "trace_0": "damaged"}
