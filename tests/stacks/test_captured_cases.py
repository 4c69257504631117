"""Real captures of hung and healthy jobs, read as `allranks stacks --from` reads them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.api.functions import diagnose
from allranks.cli import main
from allranks.model.stacks import CAUSES, ProcessCapture
from allranks.stacktraces import classify, read_bundle, read_capture, write_bundle

CASES = Path(__file__).parent / "cases"
HANGS = sorted(path.name for path in (CASES / "hangs").iterdir())
VICTIMS = json.loads((CASES / "victims_truth.json").read_text())
# What Python frames and /proc cannot tell apart without native frames or the text of the line.
NEEDS_NATIVE = {"gil_spin", "nogil_pause", "simplequeue_get", "irecv"}


@pytest.mark.parametrize("case", HANGS)
def test_the_command_tells_cause_culprit_and_hang_of_a_captured_job(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank's cause, the guilty ranks and the word `hung` are those of the truth."""
    truth = json.loads((CASES / "hangs" / case / "truth.json").read_text())
    code = main(["stacks", "--from", str(CASES / "hangs" / case), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {rank: state["cause"] for rank, state in answer["ranks"].items()} == truth["labels"]
    assert answer["culprits"] == truth["culprit_ranks"]
    assert answer["hung"] == truth["hung"]
    assert code == (0 if truth["hung"] is False else 1)
    for rank, place in truth.get("where", {}).items():
        assert answer["ranks"][rank]["where"].startswith(place)
    assert answer["schema"] == 1 and answer["sentence"]


@pytest.mark.parametrize("case", sorted(VICTIMS))
def test_the_cause_of_a_captured_victim_is_told(case: str) -> None:
    """Eighty small programs, each stuck in its own way."""
    report = classify(read_capture(CASES / "victims" / f"{case}.json"))
    assert {str(rank): state.cause for rank, state in report.ranks.items()} == VICTIMS[case]
    assert all(state.evidence for state in report.ranks.values())


@pytest.mark.parametrize("case", sorted(set(VICTIMS) - NEEDS_NATIVE))
def test_the_cause_is_told_without_native_frames(case: str) -> None:
    """The first passes, which stop nobody, are enough for nearly every cause."""
    capture = read_capture(CASES / "victims" / f"{case}.json")
    bare = replace(capture, processes=tuple(_bare(process) for process in capture.processes))
    report = classify(bare)
    assert {str(rank): state.cause for rank, state in report.ranks.items()} == VICTIMS[case]


def _bare(process: ProcessCapture) -> ProcessCapture:
    return replace(process, native=())


def test_most_causes_of_the_contract_are_seen_in_real_captures() -> None:
    """Only what this machine cannot show (a device) and what is not a cause is missing."""
    seen = {cause for truth in VICTIMS.values() for cause in truth.values()}
    for case in HANGS:
        seen |= set(json.loads((CASES / "hangs" / case / "truth.json").read_text())["labels"].values())
    live = {"gil_contention"}  # a victim of its own in test_live_victims.py
    assert set(CAUSES) - seen == {"cuda_wait", "cuda_kernel", "unknown"} | live
    assert seen <= set(CAUSES)


def test_the_place_is_the_users_line_and_the_worker_is_named() -> None:
    """`where` names the user's own line; a starved DataLoader names the worker that sleeps."""
    report = read_bundle(CASES / "hangs" / "gloo_allreduce_missing_rank")
    assert report.ranks[2].where == "cases.py:13 in load_batch_slow_storage"
    assert report.sentence == (
        "rank 2 sleeps in load_batch_slow_storage (cases.py:13) while 3 ranks wait in all_reduce"
    )
    starved = read_bundle(CASES / "hangs" / "dataloader_worker_sleep")
    workers = {child.child: child.cause for child in starved.ranks[0].children}
    assert workers == {0: "queue_wait", 1: "sleep"}
    assert "child 1" in starved.ranks[0].evidence


def test_a_deadlock_names_both_threads_and_their_lines() -> None:
    """The cycle is shown with thread names, lines and, where known, their text."""
    state = read_bundle(CASES / "hangs" / "lock_deadlock_abba").ranks[0]
    assert "metrics at cases.py:88" in state.evidence
    assert "ckpt-writer at cases.py:90" in state.evidence
    assert "b.acquire()" in state.evidence


@pytest.mark.parametrize("case", HANGS)
def test_a_bundle_says_the_same_as_the_raw_files(case: str, tmp_path: Path) -> None:
    """Writing a capture as a bundle and reading it again loses nothing."""
    capture = read_capture(CASES / "hangs" / case)
    write_bundle(capture, tmp_path)
    assert read_capture(tmp_path).processes == capture.processes
    assert read_bundle(tmp_path).ranks == classify(capture).ranks


def test_bundles_of_several_nodes_are_read_as_one_job(tmp_path: Path) -> None:
    """One folder per node, one report over all of them."""
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    for node, ranks in (("node-a", (0, 1)), ("node-b", (2, 3))):
        part = replace(
            capture,
            processes=tuple(one for one in capture.processes if one.rank in ranks),
            marks=tuple(one for one in capture.marks if one.rank in ranks),
        )
        write_bundle(part, tmp_path / node)
    report = read_bundle(tmp_path)
    assert report.culprits == (2,)
    assert sorted(report.ranks) == [0, 1, 2, 3]


def test_without_progress_marks_the_answer_is_that_it_cannot_be_told(tmp_path: Path) -> None:
    """Stacks alone never make a verdict of hung; the odd rank is still named."""
    for path in (CASES / "hangs" / "gloo_allreduce_missing_rank").iterdir():
        if not path.name.endswith("progress.jsonl"):
            shutil.copy(path, tmp_path / path.name)
    report = read_bundle(tmp_path)
    assert report.hung is None
    assert report.culprits == (2,)
    assert "cannot tell stuck from slow" in report.sentence


def test_a_job_in_which_every_rank_waits_alike_has_no_culprit() -> None:
    """Nobody is different: that is said, and nobody is accused."""
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    waiting = tuple(one for one in capture.processes if one.rank != 2)
    marks = tuple(one for one in capture.marks if one.rank != 2)
    report = classify(replace(capture, processes=waiting, marks=marks))
    assert report.hung is True
    assert report.culprits == ()
    assert "their stacks do not differ" in report.sentence


def test_the_rank_that_waits_elsewhere_than_the_majority_is_named() -> None:
    """Three ranks in one collective and one in another: the one is odd."""
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    stray = next(p for p in read_capture(CASES / "hangs" / "sglang_like").processes if p.rank == 1)
    processes = tuple(replace(stray, rank=2) if p.rank == 2 else p for p in capture.processes)
    report = classify(replace(capture, processes=processes))
    assert report.culprits == (2,)


def test_an_idle_server_is_not_hung() -> None:
    """When every rank waits for requests nobody is stuck."""
    capture = read_capture(CASES / "victims" / "zmq_recv.json")
    report = classify(capture)
    assert report.hung is False
    assert report.culprits == ()
    assert report.ranks[0].cause == "request_wait"


NCCL = CASES / "nccl_hang_h200"


@pytest.mark.skipif(not NCCL.exists(), reason="recorded on a GPU machine by scripts/gpu_stacks.py")
def test_a_real_nccl_hang_names_the_rank_that_is_behind() -> None:
    """Two NCCL ranks on one H200, one collective too many on rank 0: rank 1 is the one the other waits for."""
    report = read_bundle(NCCL)
    assert report.culprits == (1,)
    assert report.ranks[0].cause in ("cuda_wait", "collective_wait")
    assert report.ras


STRANGE = {
    "host17_rank{r}_pid9{r}.txt": "pyspy.txt",
    "{r}_a100-{h}.out": "pyspy.txt",
    "stack_{r}": "pyspy.txt",
    "gpu-{h}/rank{r}/stack.json": "pyspy.s1.json",
    "worker-{r}.json": "pyspy_native.json",
}


@pytest.mark.parametrize("name", STRANGE)
def test_stacks_in_files_of_any_name_are_read_by_their_content(name: str, tmp_path: Path) -> None:
    """What people call the output of py-spy at night; the number of a host or a process is not the rank."""
    case = CASES / "hangs" / "gloo_allreduce_missing_rank"
    for rank in range(4):
        file = tmp_path / name.format(r=rank, h=90 - 7 * rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(case / f"rank{rank}.{STRANGE[name]}", file)
    verdict = diagnose(tmp_path).verdict
    assert (verdict.cause, verdict.ranks, verdict.where) == (
        "sleep",
        (2,),
        "cases.py:13 in load_batch_slow_storage",
    )
    if "/" not in name:
        assert read_bundle(tmp_path).culprits == (2,)


def test_a_file_with_the_stacks_of_all_processes_of_a_node_is_taken_apart(tmp_path: Path) -> None:
    """`for p in $(pgrep python); do py-spy dump -p $p; done > node.txt`: the workers of a DataLoader belong to the rank before them."""
    case = CASES / "hangs" / "dataloader_worker_sleep"
    parts = [f"rank{rank}{child}.pyspy.txt" for rank in range(2) for child in ("", ".child0", ".child1")]
    (tmp_path / "node.txt").write_text("".join((case / part).read_text() for part in parts))
    report = read_bundle(tmp_path)
    assert report.culprits == (0,) and report.ranks[0].cause == "dataloader_wait"
    assert [(one.child, one.cause) for one in report.ranks[0].children] == [(0, "queue_wait"), (1, "sleep")]
    assert "the rank of 2 processes is not known: they are counted in the order of the files" in report.notes


def test_diagnose_says_what_a_single_look_at_one_process_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is accused, and the line where it stands is shown."""
    shutil.copy(CASES / "hangs" / "lock_deadlock_abba" / "rank0.pyspy.txt", tmp_path / "dump.txt")
    assert main(["diagnose", str(tmp_path)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        first.startswith("unclear: cannot tell stuck from slow") and "update_metrics (cases.py:88)" in first
    )


def test_diagnose_of_logs_alone_names_the_command_that_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watchdog's text is all that many jobs leave."""
    (tmp_path / "rank_0.log").write_text("[Rank 0] Watchdog caught collective operation timeout\n")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "allranks doctor explain PATH" in capsys.readouterr().err
