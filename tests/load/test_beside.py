"""Dumps in two formats with stacks beside them: one attempt, and the stacks are used."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.load import LoadOptions, load_paths

CASE = Path(__file__).parent / "stacks_beside"


def test_the_same_dumps_in_two_formats_are_one_attempt_and_the_telling_one_wins() -> None:
    """Pickles hold stacks, JSON does not; both end at the same moment."""
    result = load_paths([str(CASE)], LoadOptions())
    assert len(result.attempts) == 1
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


def test_stacks_inside_an_archive_are_left_out_with_the_way_to_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dumps beside them are read; unpacked, the stacks say where the rank is."""
    packed, unpacked = tmp_path / "hang.tar.gz", tmp_path / "unpacked"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(CASE, "hang")
    assert main(["diagnose", str(packed), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"]["ranks"] == [2]
    assert f"stack captures in {packed} left out: unpack it" in said.err
    shutil.copytree(CASE, unpacked)
    assert main(["diagnose", str(unpacked), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["where"] == "case.py:5 in slow_data_loader"


def test_a_log_without_a_line_is_no_damage(tmp_path: Path) -> None:
    """An empty dump is."""
    for name in ("rank0.log", "trace_0"):
        (tmp_path / name).touch()
    notes = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True)).files
    assert {note.path: note.status for note in notes} == {"rank0.log": "skipped", "trace_0": "damaged"}
