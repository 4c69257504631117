"""Everything in the folder is used: stacks, logs and NCCL's answers beside the dumps, and listed as used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from allranks.api.functions import diagnose
from allranks.cli import main
from allranks.diagnosis.context import is_internal, user_frame
from allranks.model.stacks import Capture, ProcessCapture, Snapshot, StackFrame, ThreadStack
from allranks.model.trace import Frame
from allranks.stacktraces import classify, read_capture, write_bundle

CASES = Path(__file__).parent / "cases"
PYSPY = """Process {pid}: python train.py

Thread {pid} (idle): "MainThread"
    {name} ({file}:{line})
    train (train.py:80)
"""
RAS = """Communicators... (0.00s)
#0-0 (8a2b1f) MISMATCH
  Communicator ranks have different collective operation counts
  2 ranks have launched up to operation 6
  Rank 1 has launched up to operation 5 -- GPU 1 managed by process 77 on node a
"""


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """A hang in which rank 1 never enters a call."""
    return Path(shutil.copytree(CASES / "flight_recorder_missing_rank" / "dumps", tmp_path / "dumps"))


def _stack(rank: int, *frames: tuple[str, str, int]) -> ProcessCapture:
    thread = ThreadStack(
        tid=100 + rank, name="MainThread", frames=tuple(StackFrame(*frame) for frame in frames)
    )
    return ProcessCapture(rank, pid=100 + rank, snapshots=(Snapshot(0, stacks=(thread,)),))


WAITS = ("init_process_group", "torch/distributed/distributed_c10d.py", 1700)


def test_our_own_stacks_bundle_is_used_and_listed_as_used(dumps: Path) -> None:
    """It says where the missing rank is; the file is no longer "skipped"."""
    write_bundle(
        Capture((_stack(1, ("sleep", "time.py", 1), ("load_batch", "/home/u/data.py", 61)),)),
        dumps / "stacks",
    )
    result = diagnose(dumps).diagnosis
    assert result.verdict is not None and result.verdict.ranks == (1,)
    assert "data.py:61" in result.verdict.sentence, result.verdict.sentence
    note = next(note for note in result.files if note.path.endswith("bundle.json"))
    assert (note.status, note.kind, note.note) == ("ok", "stacks", "used")


def test_files_named_by_process_are_stacks_of_their_ranks(tmp_path: Path) -> None:
    """Without black boxes near them in the order of their pids, which is said."""
    for pid, name, file in ((310, "all_reduce", "distributed_c10d.py"), (311, "load_batch", "data.py")):
        text = PYSPY.format(pid=pid, name=name, file=file, line=61)
        (tmp_path / f"pyspy_node-1_{pid}.txt").write_text(text)
    capture = read_capture(tmp_path)
    assert [process.rank for process in capture.processes] == [0, 1]
    assert classify(capture).ranks[1].where == "data.py:61 in load_batch"
    assert "numbered by host and pid" in " ".join(capture.notes)


def test_the_end_of_a_log_is_evidence_against_the_rank_it_is_of(dumps: Path) -> None:
    """Torch's prefix names the rank; what other ranks' logs say is not told."""
    (dumps / "train.log").write_text(
        "step 4\n[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: sample 173 is cut\n"
    )
    (dumps / "rank0.log").write_text("RuntimeError: Connection closed by peer\n")
    result = diagnose(dumps).diagnosis
    assert result.verdict is not None
    told = [line for line in result.verdict.evidence if "log" in line]
    assert told == ["the log of rank 1 ends with: ValueError: sample 173 is cut"]
    kinds = {Path(note.path).name: note.kind for note in result.files}
    assert kinds["train.log"] == kinds["rank0.log"] == "log"


def test_an_answer_of_nccl_ras_is_evidence(dumps: Path) -> None:
    """The rank that has launched fewer operations."""
    (dumps / "ras.txt").write_text(RAS)
    result = diagnose(dumps).diagnosis
    assert result.verdict is not None
    assert any("NCCL RAS: " in line and "rank 1" in line for line in result.verdict.evidence), (
        result.verdict.evidence
    )


def test_stacks_alone_show_who_is_absent_in_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has made a call: the bundle is all there is."""
    copies = ("copy_dataset", "/home/u/data.py", 12)
    write_bundle(
        Capture((_stack(0, WAITS), _stack(1, WAITS), _stack(2, ("sleep", "time.py", 1), copies))), tmp_path
    )
    assert main(["diagnose", str(tmp_path), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("not_started", [2])
    assert "data.py:12" in verdict["sentence"]


def test_the_stack_of_the_survivor_does_not_hide_how_the_other_ended(tmp_path: Path) -> None:
    """It waits at its end, which says nothing of the rank that gloo aborted."""
    dumps = Path(shutil.copytree(CASES / "flight_recorder_crash_seed_async" / "dumps", tmp_path / "dumps"))
    (dumps / "rank_1.log").write_text("gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 20 vs 12.\n")
    write_bundle(Capture((_stack(0, ("sleep", "time.py", 1), ("finish", "/home/u/job.py", 58)),)), dumps)
    verdict = diagnose(dumps).diagnosis.verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("extra_collective", (0,))


@pytest.mark.parametrize(
    ("log", "causes", "ranks"),
    [
        (
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
            "  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 12.\n",
            ("size_mismatch", "extra_collective"),
            (0,),
        ),
        ("step 4 loss 0.3\nKilled\n", ("rank_died",), (1,)),
    ],
)
def test_the_log_of_a_rank_without_a_dump_tells_how_it_ended(
    tmp_path: Path, log: str, causes: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    """gloo aborts the rank that gets more than it expects, and says so in its log; a kill is the rank's own end."""
    dumps = Path(shutil.copytree(CASES / "flight_recorder_crash_seed_async" / "dumps", tmp_path / "dumps"))
    before = diagnose(dumps).diagnosis.verdict
    (dumps / "rank_1.log").write_text(log)
    result = diagnose(dumps).diagnosis
    assert before is not None and result.verdict is not None
    assert result.verdict.ranks == ranks and result.verdict.cause in causes
    assert result.verdict.confidence > before.confidence
    assert any(
        log.split("\n")[-2].split()[0] in line for line in (*result.verdict.evidence, result.verdict.sentence)
    )
    note = next(note for note in result.files if note.path.endswith("rank_1.log"))
    assert (note.status, note.kind, note.note) == ("ok", "log", "used")


def test_what_others_logged_of_a_lost_peer_stands_beside_the_verdict(tmp_path: Path) -> None:
    """ "Connection closed by peer" is not an end of its own, but it shows that somebody else has ended."""
    dumps = Path(shutil.copytree(CASES / "flight_recorder_rank_died" / "dumps", tmp_path / "dumps"))
    (dumps / "rank_1.log").write_text(
        "rank 1 failed: [pair.cc:553] Connection closed by peer [127.0.0.1]:26518\n"
    )
    verdict = diagnose(dumps).diagnosis.verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("rank_died", (2,))
    assert any("the log of rank 1 ends with" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/torch/train.py",
        "/home/me/accelerate/examples/nlp.py",
        "/home/me/torchft/train_ddp.py",
        "/home/me.software/train.py",
    ],
)
def test_a_project_in_a_folder_called_like_a_library_is_the_users(file: str) -> None:
    """Its line is named, not FSDP's, and the library's own files stay library."""
    inside = [
        Frame("all_gather", "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_collectives.py", 9),
        Frame("prepare", "/home/me/accelerate/src/accelerate/accelerator.py", 3),
        Frame("step", "/home/me/torchft/torchft/manager.py", 3),
        Frame("forward", "/opt/pytorch/torch/nn/modules/module.py", 4),
        Frame("call", "libtorch_python.so.2", 0),
    ]
    assert [is_internal(frame) for frame in inside] == [True] * 5
    assert user_frame([*inside, Frame("main", file, 7)]) == Frame("main", file, 7)
    assert not is_internal(Frame("main", file, 7))
