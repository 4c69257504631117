"""`allranks frtrace`: torchfrtrace's blocks, without its crashes and false accusations."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli import main

CASES = Path(__file__).parent / "cases"


def frtrace(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Exit code and stderr lines of `allranks frtrace …`; stdout must stay empty."""
    code = main(["frtrace", *words])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err.splitlines()


def test_the_block_of_a_missing_rank_is_torchfrtraces_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Line by line, because scripts parse it."""
    code, lines = frtrace(capsys, str(CASES / "broken_dumps/ring_skew_hang"))
    assert code == 0
    assert lines == [
        "Not all ranks joining collective, sequence number: 70",
        "internal record id: 19",
        "group info: 0:default_pg",
        "collective: nccl:all_reduce",
        "missing ranks: {1}",
        "input sizes: [[4, 4]]",
        "output sizes: [[4, 4]]",
        "world size: 2",
        "expected ranks: {0, 1}",
        "collective state: started",
        "collective stack trace: ",
        " f at train.py:10",
    ]


def test_torchfrtrace_itself_prints_this_block() -> None:
    """The same lines come out of the original, among its false ones."""
    pytest.importorskip("torch")
    script = Path(sys.executable).parent / "torchfrtrace"
    if not script.exists():
        pytest.skip("torchfrtrace is not installed here")
    folder = str(CASES / "broken_dumps/ring_skew_hang")
    original = subprocess.run([str(script), folder], capture_output=True, text=True, timeout=300).stderr
    ours = subprocess.run(
        [sys.executable, "-m", "allranks", "frtrace", folder], capture_output=True, text=True, timeout=300
    ).stderr
    assert ours.startswith("Not all ranks joining") and ours in original


def test_the_root_cause_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 skipped a call of tp1; that rank 2 lacks in the default group is its consequence."""
    _, lines = frtrace(capsys, str(CASES / "broken_dumps/cascade"))
    assert [line for line in lines if line.startswith("group info")] == [
        "group info: tp1:tp",
        "group info: 0:default_pg",
    ]
    assert [line for line in lines if line.startswith("missing")] == [
        "missing ranks: {3}",
        "missing ranks: {2}",
    ]


def test_a_mismatch_names_the_culprit_in_the_original_words(capsys: pytest.CaptureFixture[str]) -> None:
    """On gloo dumps too, which the original cannot read at all."""
    _, lines = frtrace(capsys, str(CASES / "flight_recorder/different_types"))
    assert lines[0] == "Collective sequence number: 5 has errors"
    assert (
        "error msg: Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_gather' "
        "does not match found collective type: 'broadcast'"
    ) in lines


@pytest.mark.parametrize(
    "case",
    ["nccl/pipeline_healthy", "broken_dumps/all_to_all_single_uneven", "broken_dumps/coalesced_pipeline",
     "broken_dumps/p2p_in_big_group", "broken_dumps/json_dump", "flight_recorder/normal"],
)  # fmt: skip
def test_healthy_jobs_print_nothing(capsys: pytest.CaptureFixture[str], case: str) -> None:
    """The original accuses somebody, or crashes, on every one of these."""
    assert frtrace(capsys, str(CASES / case)) == (0, [])


def test_a_rank_without_a_dump_is_said_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """And not even said with --allow-incomplete-ranks."""
    folder = str(CASES / "flight_recorder/rank_died")
    _, lines = frtrace(capsys, folder)
    assert lines[0] == "Missing dump files from ranks {2}"
    _, lines = frtrace(capsys, folder, "--allow-incomplete-ranks")
    assert not any(line.startswith("Missing dump files") for line in lines)


def test_damaged_files_are_named_and_the_rest_is_analysed(capsys: pytest.CaptureFixture[str]) -> None:
    """A truncated file costs one line."""
    code, lines = frtrace(capsys, str(CASES / "broken_dumps/truncated_file"))
    assert code == 0 and lines[0].startswith("trace_3: truncated")


def test_filters_work_without_j(capsys: pytest.CaptureFixture[str]) -> None:
    """The original refuses them."""
    folder = str(CASES / "nccl/cascade")
    _, all_lines = frtrace(capsys, folder)
    _, tp_lines = frtrace(capsys, folder, "--pg-filters", "tp_1")
    _, rank_lines = frtrace(capsys, folder, "--selected-ranks", "0")
    groups = [
        [line for line in lines if line.startswith("group info")]
        for lines in (all_lines, tp_lines, rank_lines)
    ]
    assert groups[0][0] == "group info: 2:tp_1" and len(groups[0]) == 3
    assert groups[1:] == [["group info: 2:tp_1"], ["group info: 3:dp_0"]]


def test_entries_are_printed_a_column_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """-j, as `allranks diagnose -j`, with its filters, and the stacks with --print_stack_trace."""
    folder = str(CASES / "nccl/pipeline_healthy")
    _, lines = frtrace(capsys, folder, "-j", "-v", "--selected-ranks", "0", "1", "--print_stack_trace")
    assert lines[0].split() == ["rank", "0", "rank", "1"]
    assert lines[5].startswith("send(s=0 d=1, input_sizes=[[8]], state=scheduled)")
    assert "recv(s=0 d=1, input_sizes=[[8]]" in lines[5]
    assert any(line.startswith("stack 0") for line in lines)


def test_the_output_is_written_to_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """-o: the lines that are printed."""
    out = tmp_path / "blocks.txt"
    code, lines = frtrace(capsys, str(CASES / "broken_dumps/cascade"), "-o", str(out))
    assert code == 0 and lines[-1] == f"Wrote {out}" and out.read_text().splitlines() == lines[:-1]


def test_torchft_ranks_are_moved_to_the_whole_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two replicas of two ranks, each calling its ranks 0 and 1."""
    for rank in range(4):
        dump = pickle.loads((CASES / "broken_dumps/ring_skew_hang" / f"trace_{rank % 2}").read_bytes())
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump, 2))
    _, lines = frtrace(capsys, str(tmp_path), "--transform-ft", "--group-world-size", "2")
    assert [line for line in lines if line.startswith("missing ranks")] == [
        "missing ranks: {1}",
        "missing ranks: {3}",
    ]
    assert main(["frtrace", str(tmp_path), "--transform-ft"]) == 2


@pytest.mark.parametrize("words", [[], ["/nowhere/at/all"]])
def test_what_cannot_run_exits_2_with_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """No traceback."""
    assert main(["frtrace", *words]) == 2
    assert capsys.readouterr().err.startswith("allranks frtrace: ")


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_convert_keeps_the_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str) -> None:
    """Through every format and back the blocks stay the same, but for the stacks that JSON has not."""
    _, before = frtrace(capsys, str(CASES / "nccl/cascade"))
    assert main(["dump", str(CASES / "nccl/cascade"), "-o", str(tmp_path / "one"), "--format", form]) == 0
    assert (
        main(["dump", str(tmp_path / "one"), "-o", str(tmp_path / "two"), "--format", "pickle", "--json"])
        == 0
    )
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["files"]) == 4
    _, after = frtrace(capsys, str(tmp_path / "two"))
    heads = [[line for line in lines if line.partition(":")[0] in ("missing ranks", "group info", "collective")]
             for lines in (before, after)]  # fmt: skip
    assert heads[0] == heads[1] and heads[0]


def test_convert_never_overwrites_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--force does."""
    out = tmp_path / "rank0.json"
    source = str(CASES / "nccl/cascade/trace_0")
    assert main(["dump", source, "-o", str(out)]) == 0
    out.write_text("mine")
    assert main(["dump", source, "-o", str(out)]) == 2
    assert out.read_text() == "mine" and "--force" in capsys.readouterr().err
    assert main(["dump", source, "-o", str(out), "--force"]) == 0
    assert json.loads(out.read_text())["version"] == "2.10"
