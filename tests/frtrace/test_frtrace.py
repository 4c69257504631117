"""`allranks frtrace` and its programmatic door: torchfrtrace's blocks, without its crashes and false accusations."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import main
from allranks.frtrace import Database, JobConfig, MatchState, build_db, read_dir, transform_ft

CASES = Path(__file__).parent / "cases"


def frtrace(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Exit code and stderr lines of `allranks frtrace …`; stdout must stay empty."""
    code = main(["frtrace", *words])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err.splitlines()


def database(folder: Path) -> Database:
    args = JobConfig().parse_args([str(folder)])
    details, version = read_dir(args)
    return build_db(details, args, version)


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
    assert code == 0 and lines[0].startswith("trace_3: cut short")


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
    """-j, with its filters, and the stacks with --print_stack_trace."""
    folder = str(CASES / "nccl/pipeline_healthy")
    _, lines = frtrace(capsys, folder, "-j", "--selected-ranks", "0", "1", "--print_stack_trace")
    assert lines[0].split() == ["Rank", "0", "Rank", "1"]
    assert lines[5].startswith(
        "send(s=0 d=1, input_sizes=[[8]], state=scheduled)  recv(s=0 d=1, input_sizes=[[8]]"
    )
    assert any(line.startswith("stack_id") for line in lines)
    _, lines = frtrace(capsys, folder, "-j", "-v")
    assert "collective_seq_id | p2p_seq_id=1" in lines[2] and "pg_description=default_pg" in lines[2]


def test_the_database_is_written_and_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """-o writes (types, Database); -v prints its tables."""
    out = tmp_path / "db.pickle"
    code, lines = frtrace(capsys, str(CASES / "broken_dumps/cascade"), "-v", "-o", str(out))
    assert code == 0 and lines[-1] == f"Wrote {out}"
    assert {"Groups", "Memberships", "Collectives", "NCCLCalls"} <= set(lines)
    types, stored = pickle.loads(out.read_bytes())
    assert types[0].name == "Database"
    assert stored == database(CASES / "broken_dumps/cascade")


def test_the_door_has_what_the_documentation_shows() -> None:
    """profiling_name and name exist, ids join, and missing ranks fail the check."""
    db = database(CASES / "broken_dumps/cascade")
    bad = [collective for collective in db.collectives if not collective.pass_check]
    assert [(c.profiling_name, c.missing_ranks, c.collective_seq_id) for c in bad] == [
        ("nccl:all_reduce", {3}, 2), ("nccl:all_reduce", {2}, 2),
    ]  # fmt: skip
    groups = {group.name: group for group in db.groups}
    assert set(groups) == {"0", "tp0", "tp1"} and groups["tp1"].size == 2
    assert {c.group_id for c in db.collectives} <= {group.id for group in db.groups}
    assert {call.collective_id for call in db.ncclcalls} <= {c.id for c in db.collectives}
    assert db.tracebacks[db.ncclcalls[0].traceback_id].frames == "f at train.py:10"
    assert {m.global_rank for m in db.memberships if m.group_id == "tp1"} == {2, 3}


def test_the_door_tells_types_of_mismatch() -> None:
    """MatchInfo as in the original."""
    bad = [c for c in database(CASES / "flight_recorder/different_types").collectives if not c.pass_check]
    info = bad[0].type_of_mismatch
    assert info is not None and info.state is MatchState.COLLECTIVE_TYPE_MISMATCH
    assert (
        bad[0].mismatch_collectives is not None
        and bad[0].mismatch_collectives[2].collective_name == "gloo:broadcast"
    )


def test_the_door_takes_details_as_torch_reads_them() -> None:
    """A plain dictionary of dumps, made by torch's own read_dir or by hand."""
    details: dict[str, dict[str, Any]] = {}
    for rank in range(4):
        dump = pickle.loads((CASES / f"broken_dumps/cascade/trace_{rank}").read_bytes())
        details[f"trace_{rank}"] = {"rank": rank, "host_name": "x", **dump}
    args = JobConfig().parse_args([])
    assert build_db(details, args, "2.10") == database(CASES / "broken_dumps/cascade")


def test_details_look_like_torchs() -> None:
    """Scripts that go through details find rank, entries, version and pg_config."""
    details, version = read_dir(JobConfig().parse_args([str(CASES / "broken_dumps/cascade")]))
    assert version == "2.10" and sorted(details) == [f"trace_{rank}" for rank in range(4)]
    one = details["trace_2"]
    assert one["rank"] == 2 and len(one["entries"]) == 3 and one["pg_config"]["tp1"]["ranks"] == "[2, 3]"


def test_torchft_ranks_are_moved_to_the_whole_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two replicas of two ranks, each calling its ranks 0 and 1."""
    for rank in range(4):
        dump = pickle.loads((CASES / "broken_dumps/ring_skew_hang" / f"trace_{rank % 2}").read_bytes())
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump, 2))
    args = JobConfig().parse_args([str(tmp_path)])
    details = transform_ft(read_dir(args)[0], 2)
    db = build_db(details, args, "2.10")
    assert sorted(sorted(c.missing_ranks or ()) for c in db.collectives if not c.pass_check) == [[1], [3]]
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


def test_dump_info_tells_what_a_file_is(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and as JSON; damaged files exit 1."""
    assert main(["dump", str(CASES / "nccl/cascade/trace_3"), "--info", "--calls", "2"]) == 0
    text = capsys.readouterr().out
    assert "torch pickle 2.10, rank 3" in text and "group 4 dp_1 [1, 3]: 3 calls, #1…#3" in text
    assert main(["dump", str(CASES / "broken_dumps/truncated_file/trace_3"), "--info", "--json"]) == 1
    about = json.loads(capsys.readouterr().out)["files"][0]
    assert (about["status"], about["calls"], about["rank"]) == ("damaged", 25, 3)
    assert main(["dump", "--info", __file__]) == 1
    assert "text [skipped]" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["box", "pickle", "json"])
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
