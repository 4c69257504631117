"""One judge: the agent's verdict and `allranks diagnose` on the folder that it left are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from allranks.blackbox.header import HEADER_BYTES, start_ticks
from allranks.blackbox.reader import copy_box, read_trace
from allranks.cli import main
from allranks.incidents.evidence import Evidence, Observed, find_evidence, nearest_line, read_observed
from allranks.incidents.folder import open_incident, read_incidents
from allranks.incidents.judge import accuse, correct, judge
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import WatchOptions
from allranks.load import LoadResult
from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.stacks import ChildState, RankState, StackFrame, StacksReport
from allranks.model.trace import CALL, RankTrace, TraceHeader
from allranks.report import text
from allranks.stacktraces.classify import find_culprits
from boxes import write_box

GONE = 2**22  # no process has such a number
DIED = Finding("rank_died", (2,), "rank 2 died of SIGKILL", confidence=1.0)


def stacks(*causes: str) -> StacksReport:
    """Of ranks 0, 1, …"""
    ranks = {rank: RankState(rank, cause, "data.py:3 in load", "") for rank, cause in enumerate(causes)}
    return StacksReport(hung=True, culprits=(), sentence="", ranks=ranks)


def named(diagnosis: Diagnosis | None) -> tuple[str, tuple[int, ...]]:
    """Cause and ranks of the verdict."""
    assert diagnosis is not None and diagnosis.verdict is not None
    return diagnosis.verdict.cause, diagnosis.verdict.ranks


def test_a_death_that_was_seen_wins_over_what_the_survivors_say() -> None:
    """An innocent rank's "Connection closed" is a consequence; calls that do not match are the program's fault."""
    innocent = Finding("rank_died", (0,), "rank 0 raised RuntimeError: Connection closed", severity="root")
    found = correct(Diagnosis("fault", innocent, (innocent,)), None, Observed(told=DIED))
    assert named(found) == ("rank_died", (2,))
    assert found is not None and [f.severity for f in found.findings] == ["root", "consequence"]
    mismatch = Diagnosis("fault", Finding("size_mismatch", (1,), "rank 1 has another size"))
    assert named(correct(mismatch, None, Observed(told=DIED))) == ("size_mismatch", (1,))
    assert named(correct(Diagnosis("unclear", None), None, Observed(told=DIED))) == ("rank_died", (2,))


@pytest.mark.parametrize(
    ("told", "cause"), [(DIED, "extra_collective"), (replace(DIED, where="train.py:9"), "rank_died")]
)
def test_a_rank_that_died_of_a_call_in_the_wrong_order_is_named_for_the_call(
    told: Finding, cause: str
) -> None:
    """A prefetch that comes too early meets another gather of the others, and gloo aborts the rank: its death follows."""
    cause = "missing_rank" if cause == "extra_collective" else cause
    skipped = Finding("missing_rank", (2,), "rank 2 skipped all_gather #13", "root", confidence=0.85)
    skipped = replace(skipped, met_another=True, waiting=(0, 1))
    found = correct(Diagnosis("fault", skipped, (skipped,)), None, Observed(told=told))
    assert named(found) == (cause, (2,))


@pytest.mark.parametrize(
    ("told", "cause"), [(DIED, "extra_collective"), (replace(DIED, where="train.py:9"), "rank_died")]
)
def test_a_rank_that_died_of_its_own_extra_call_is_named_for_the_call(told: Finding, cause: str) -> None:
    """gloo aborts a process that gets a message of another size; one that raised has said itself why it ended."""
    gone = Finding("rank_died", (2,), "rank 2 died with all_reduce #11 unfinished", severity="root")
    extra = Finding("extra_collective", (2,), "rank 2 made an extra all_reduce #12", confidence=0.7)
    found = correct(Diagnosis("fault", gone, (gone, extra)), None, Observed(told=told))
    assert named(found) == (cause, (2,))
    assert found is not None and [f.severity for f in found.findings].count("root") == 1


@pytest.mark.parametrize(("told", "guilty"), [(DIED, 2), (replace(DIED, confidence=0.9), 1)])
def test_a_call_that_others_could_not_make_after_a_death_is_not_its_cause(told: Finding, guilty: int) -> None:
    """Rank 1 was first in the next call when rank 2 died of itself; a rank that aborted may have died of that call."""
    extra = Finding("extra_collective", (1,), "rank 1 made an extra all_reduce", severity="root")
    assert named(correct(Diagnosis("fault", extra, (extra,)), None, Observed(told=told)))[1] == (guilty,)


@pytest.mark.parametrize(
    ("found", "told", "guilty"),
    [
        (Finding("extra_collective", (1,), "", waiting=(0, 2)), DIED, (1,)),
        (Finding("missing_rank", (1,), "", waiting=(0, 2), met_another=True), DIED, (1,)),
        (Finding("missing_rank", (1,), "", waiting=(0, 2)), DIED, (2,)),  # it would have come
        (
            Finding("missing_rank", (1,), "", waiting=(0, 2), met_another=True),
            replace(DIED, where="a.py:3"),
            (2,),
        ),
        (Finding("missing_rank", (1,), "", waiting=(0,), met_another=True), DIED, (2,)),
        (Finding("missing_rank", (2,), "", waiting=(0, 1), met_another=True, confidence=0.85), DIED, (2,)),
    ],
)
def test_a_rank_that_died_in_a_call_that_met_another_died_of_that(
    found: Finding, told: Finding, guilty: tuple[int, ...]
) -> None:
    """gloo aborts the innocent rank that gets a message of another size: a validation batch fewer on rank 1."""
    found = replace(found, severity="root")
    assert named(correct(Diagnosis("fault", found, (found,)), None, Observed(told=told)))[1] == guilty


@pytest.mark.parametrize(
    ("named_in_error", "guilty"), [("Ranks 1", (1,)), ("Ranks 1, 3", (1, 3)), ("Ranks 3", (0,))]
)
def test_a_rank_that_ended_of_an_error_about_others_is_not_blamed_for_their_absence(
    named_in_error: str, guilty: tuple[int, ...]
) -> None:
    """monitored_barrier raises on rank 0 and says which ranks did not come."""
    error = f"rank 0 raised RuntimeError at a.py:3: [Rank 0]: {named_in_error} failed to pass monitoredBarrier in 6000 ms"
    missing = Finding(
        "missing_rank", guilty if guilty != (0,) else (1,), "never entered", "root", confidence=0.9
    )
    told = Finding("rank_died", (0,), error, confidence=1.0, where="a.py:3")
    assert named(correct(Diagnosis("fault", missing, (missing,)), None, Observed(told=told)))[1] == guilty


@pytest.mark.parametrize(("left", "wanted"), [((2,), ("missing_rank", (2,))), ((), ("none_finished", ()))])
def test_connections_that_broke_since_a_rank_had_ended_its_program_are_its_fault(
    left: tuple[int, ...], wanted: tuple[str, tuple[int, ...]]
) -> None:
    """sys.exit(0) of one rank: nobody died. Without it the rank that is not in the call yet may be innocent."""
    broken = Finding(
        "none_finished", (), "connections between ranks broke", confidence=0.7, where="train.py:3"
    )
    missing = Finding("missing_rank", (2,), "rank 2 never entered all_reduce #36", "root", confidence=0.9)
    diagnosis = Diagnosis("fault", missing, (missing,))
    assert named(correct(diagnosis, None, Observed(told=broken, left=left))) == wanted


def test_the_rank_that_has_not_moved_since_before_a_regroup_is_in_the_diagnosis_too() -> None:
    """The boxes of a new group accuse who is waited for there."""
    boxes = Diagnosis("fault", Finding("stuck_before_collective", (0,), "rank 0 is late"))
    observed = Observed(reason="silent", quiet_s=12.0, unmoved=(1,), marked=(0, 1))
    assert named(correct(boxes, stacks("collective_wait", "sleep"), observed)) == ("sleep", (1,))
    assert named(correct(boxes, stacks("collective_wait", "collective_wait"), observed))[1] == (0,)


def test_a_rank_that_could_not_record_the_end_of_its_call_is_no_case_for_the_network() -> None:
    """It was stopped, or C code holds the GIL, right after the call ended; one that waits in it may have a bad link."""
    found = Finding("none_finished", (1,), "all_reduce ended on rank 0 but not on rank 1", confidence=0.7)
    boxes, observed = Diagnosis("fault", found), Observed(reason="silent", quiet_s=9.0, marked=(0, 1))
    for cause in ("stopped", "gil_held_native", "sleep"):
        assert named(correct(boxes, stacks("collective_wait", cause), observed)) == (cause, (1,))
    assert named(correct(boxes, stacks("collective_wait", "collective_wait"), observed))[0] == "none_finished"
    assert named(correct(boxes, None, observed))[0] == "none_finished"


@pytest.mark.parametrize(
    ("others", "cause"),
    [("collective_wait", "store_wait"), ("store_wait", "not_started"), ("rendezvous_wait", "not_started")],
)
def test_a_rank_in_a_store_wait_of_its_own_is_named_for_it_unless_others_make_a_group_too(
    others: str, cause: str
) -> None:
    absent = Finding("not_started", (1,), "rank 1 never came to its first collective", severity="root")
    observed = Observed(reason="silent", quiet_s=12.0, marked=(0, 1, 2))
    found = correct(Diagnosis("fault", absent, (absent,)), stacks(others, "store_wait", others), observed)
    assert named(found) == (cause, (1,))


@pytest.mark.parametrize(
    ("causes", "verdict"),
    [
        (("checkpoint_io", "busy_python", "checkpoint_io"), ("busy_python", (1,))),
        (("native_call", "stopped", "native_call"), ("stopped", (1,))),
        (("collective_wait", "sleep", "collective_wait"), ("none_finished", (0, 2))),  # a network that is cut
        (("checkpoint_io", "collective_wait", "checkpoint_io"), ("checkpoint_io", (0,))),
        (
            ("gil_held_native", "checkpoint_io", "checkpoint_io"),
            ("gil_held_native", (0,)),
        ),  # it did not record either
    ],
)
def test_ranks_that_block_in_cuda_calls_are_not_named_for_the_one_they_wait_for(
    causes: tuple[str, ...], verdict: tuple[str, tuple[int, ...]]
) -> None:
    """They keep the GIL meanwhile and cannot record that their last call ended."""
    late = Finding("none_finished", (0, 2), "all_reduce #20 ended on rank 1 but not on ranks 0, 2")
    observed = Observed(reason="silent", quiet_s=5.0, marked=(0, 1, 2))
    assert named(correct(Diagnosis("fault", late, (late,)), stacks(*causes), observed)) == verdict


def test_a_rank_whose_c_code_holds_the_gil_is_named_though_nobody_could_record_the_end_of_the_call() -> None:
    """The others keep the GIL in a copy from the GPU, which waits for it: all look busy, and no box has an end."""
    nobody = Finding(
        "none_finished", (), "all 3 ranks entered all_reduce #41 and none finished", confidence=0.7
    )
    states = stacks("checkpoint_io", "gil_held_native", "checkpoint_io").ranks
    report = StacksReport(hung=True, culprits=find_culprits(states), sentence="three are busy", ranks=states)
    found = correct(
        Diagnosis("fault", nobody, (nobody,)), report, Observed(reason="silent", marked=(0, 1, 2))
    )
    assert named(found) == ("gil_held_native", (1,))
    assert (
        found is not None
        and found.verdict is not None
        and "rank 1 holds the GIL in C code at data.py:3 in load" in found.verdict.sentence
    )


def test_a_stopped_rank_is_named_though_all_have_entered_the_call_that_none_finishes() -> None:
    """Its NCCL threads are stopped with it, so that a call which it has made does not end; the others look busy."""
    nobody = Finding(
        "none_finished", (), "all 3 ranks entered all_reduce #11 and none finished", confidence=0.7
    )
    states = stacks("native_call", "stopped", "native_call").ranks
    report = StacksReport(
        hung=True, culprits=find_culprits(states), sentence="rank 1 is stopped", ranks=states
    )
    found = correct(
        Diagnosis("fault", nobody, (nobody,)), report, Observed(reason="silent", marked=(0, 1, 2))
    )
    assert named(found) == ("stopped", (1,))


def test_a_rank_that_never_came_to_its_first_call_is_named_with_the_line_of_its_stack() -> None:
    """The boxes know only where the others wait for it."""
    found = Finding("not_started", (1,), "rank 1 never came to its first collective", where="train.py:50")
    judged = correct(Diagnosis("fault", found), stacks("collective_wait", "sleep"), Observed())
    assert named(judged) == ("not_started", (1,))
    assert judged is not None and judged.verdict is not None
    assert judged.verdict.where == "data.py:3 in load" and "data.py:3 in load" in judged.verdict.sentence


@pytest.mark.parametrize(("sure", "guilty"), [(0.35, (1,)), (0.7, ())])
def test_where_the_boxes_name_nobody_the_stacks_may_unless_they_know_less(
    sure: float, guilty: tuple[int, ...]
) -> None:
    """A replica hangs while it heals: the others wait outside any collective, and its own stack shows a lock."""
    nobody = Diagnosis("fault", Finding("no_progress", (), "no rank is in a collective", confidence=sure))
    report = replace(stacks("collective_wait", "lock_deadlock"), culprits=(1,))
    assert named(correct(nobody, report, Observed(reason="silent")))[1] == guilty


def test_remote_calls_that_wait_for_each_other_are_named() -> None:
    """Each rank runs a call of another that calls a further one, and no thread is left to answer."""
    serving = (
        StackFrame("back", "train.py", 7),
        StackFrame("_run_function", "/x/torch/distributed/rpc/internal.py", 9),
    )
    report = stacks("p2p_wait", "p2p_wait", "p2p_wait")
    ranks = {r: replace(s, stack=serving) if r else s for r, s in report.ranks.items()}
    boxes = Diagnosis("unclear", Finding("no_progress", (), "no rank is in a collective", confidence=0.35))
    found = correct(boxes, replace(report, ranks=ranks), Observed())
    assert named(found) == ("p2p_wait", (1, 2))
    assert found.verdict is not None and "rank 1 at data.py:3 in load" in found.verdict.sentence
    ranks[0] = replace(ranks[0], cause="sleep")
    assert named(correct(boxes, replace(report, ranks=ranks), Observed())) == ("no_progress", ())


def test_what_the_agent_observed_is_read_back_as_it_was(tmp_path: Path) -> None:
    """And a damaged file is none."""
    observed = Observed(7, (1,), DIED, "why", 3.5, (1,), (0, 1), (), 5.0)
    observed.write(tmp_path)
    assert read_observed(tmp_path) == observed
    (tmp_path / "observed.json").write_text("[")
    assert read_observed(tmp_path) is None


@pytest.mark.parametrize("mode", ["whole_job", "replica"])
def test_diagnose_on_an_incident_folder_says_what_the_incident_says(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 was killed; rank 0 raised because of it, and said so first."""
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    options = WatchOptions(boxes, tmp_path / "incidents", "job", mode=mode, collect_stacks=False)  # type: ignore[arg-type]
    watch = Watch(options)
    now = time.time_ns()
    closed = {"closed": b"exception: RuntimeError (train.py:9): gloo: Connection closed", "closed_ns": now}
    write_box(boxes, 0, 7, start_ns=now, **closed)  # type: ignore[arg-type]
    write_box(boxes, 1, 7, start_ns=now)
    write_box(boxes, 2, 7, start_ns=now, pid=GONE)
    if mode == "whole_job":
        watch.look()
    else:
        from allranks.watch.exits import Death

        watch.deaths.note_death(Death(2, GONE, time.time(), "died of SIGKILL"))
    watch.close()
    (story,) = read_incidents(tmp_path / "incidents")
    folder = tmp_path / "incidents" / story["id"]
    capsys.readouterr()
    assert main(["diagnose", "--json", str(folder)]) == 1
    again = json.loads(capsys.readouterr().out)["verdict"]
    kept = json.loads((folder / "diagnosis.json").read_text())["verdict"]
    assert story["verdict"]["ranks"] == [2]
    assert again == kept == story["verdict"]


def test_diagnose_on_a_job_says_what_its_open_hang_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit that is blocked leaves black boxes in which nothing is wrong; the agent has looked at the stacks."""
    job, incidents = tmp_path / "job", tmp_path / "incidents"
    job.mkdir()
    write_box(job, 0, 7)
    (job / "job.json").write_text(json.dumps({"job": "j", "incidents": str(incidents)}))
    opened = open_incident(incidents, kind="hang", job="j", reason="silent")
    Observed(told=replace(DIED, cause="shutdown_join")).write(opened.path)

    def said() -> object:
        main(["diagnose", "--json", str(job)])
        return json.loads(capsys.readouterr().out)["verdict"]

    verdict = said()
    assert isinstance(verdict, dict) and verdict["cause"] == "shutdown_join"
    opened.update(closed=1.0)
    assert said() is None


def test_diagnose_on_a_job_in_a_stall_says_who_is_waited_for_and_that_it_may_be_no_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The boxes alone accused the rank that waits; the agent has the stacks of those that have not come."""
    job, incidents = tmp_path / "job", tmp_path / "incidents"
    job.mkdir()
    write_box(job, 0, 7)
    (job / "job.json").write_text(json.dumps({"job": "j", "incidents": str(incidents)}))
    opened = open_incident(incidents, kind="stall", job="j", reason="silent")
    said = "stalled: rank 1 waits for a file lock at train.py:8 in load"
    Observed(told=replace(DIED, cause="shutdown_join"), outcome=said, taken_ns=1 << 62).write(opened.path)
    assert main(["diagnose", "--json", str(job)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"]["cause"] == "shutdown_join"
    assert [one["sentence"] for one in told["findings"] if one["cause"] == "pause"] == [
        f"not known to be a hang; {said}"
    ]


def test_of_a_replica_left_behind_the_rank_that_waits_for_nobody_is_named() -> None:
    """Rank 2 waits for rank 3, which is stopped; when all wait, nobody is accused with confidence."""
    ranks = {2: RankState(2, "collective_wait", "", ""), 3: RankState(3, "stopped", "a.py:1 in f", "state T")}
    verdict = accuse((2, 3), StacksReport(None, (3,), "", ranks), "silent")
    assert verdict is not None and (verdict.ranks, verdict.confidence) == ((3,), 0.9)
    waiting = accuse((2,), StacksReport(None, (), "", ranks), "silent")
    assert waiting is not None and waiting.confidence < 0.6
    assert accuse((2,), None, "silent") is None


def test_the_line_nearest_the_hang_is_the_users_also_in_a_dataloader_worker() -> None:
    """A rank that waits for its worker is at the line of the worker; a worker in a library says nothing."""
    worker = ChildState(1, 7, "sleep", "data.py:88 in __getitem__", "")
    rank = RankState(0, "dataloader_wait", "train.py:20 in main", "", children=(worker,))
    assert nearest_line(rank) == "data.py:88 in __getitem__ (DataLoader worker 1)"
    idle = replace(worker, cause="queue_wait", where="queues.py:107 in get")
    assert nearest_line(replace(rank, children=(idle,))) == "train.py:20 in main"


def test_a_process_that_has_the_number_of_a_dead_rank_does_not_make_it_alive() -> None:
    """Numbers are given again, after a reboot above all: yesterday's boxes were judged as those of a running job."""
    for ticks, ended in ((1, True), (start_ticks(os.getpid()), False)):
        header = TraceHeader(rank=0, host=os.uname().nodename, pid=os.getpid(), start_ticks=ticks)
        trace = RankTrace(header, np.empty(0, CALL), kind="black box 2")
        assert find_evidence(LoadResult([trace], []), [trace], []).ended is ended


def test_what_is_known_of_a_stall_is_shown_while_it_is_not_known_to_be_a_hang() -> None:
    """Who looks at the incident of a pause sees what the ranks wait for, and in it no fault."""
    evidence = Evidence(
        observed=Observed(told=replace(DIED, evidence=("rank 2: waits for a lock",)), outcome="stalled: x")
    )
    lines = list(text.render(judge(evidence)))
    assert lines[0] == "unclear: stalled: x" and "  - rank 2: waits for a lock" in lines


def test_a_box_that_was_copied_while_its_process_ran_says_so_after_the_end(tmp_path: Path) -> None:
    """`allranks dump` of a hung job, read after the job was killed, was 54% sure instead of 95%: as if the job had never hung."""
    shape = {"record_bytes": CALL.itemsize, "capacity": 1}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        ticks = start_ticks(process.pid)
        box = write_box(tmp_path, 0, 7, pid=process.pid, start_ticks=ticks, **shape)
        box.write_bytes(box.read_bytes().ljust(HEADER_BYTES + CALL.itemsize, b"\0"))
        try:
            data, at = copy_box(box), time.time_ns()
        finally:
            process.kill()
    copied = write_box(tmp_path, 0, 7)
    copied.write_bytes(data)
    trace = read_trace(copied)
    trace = replace(trace, header=replace(trace.header, host=os.uname().nodename))
    found = find_evidence(LoadResult([trace], []), [trace], [str(tmp_path)])
    assert not found.ended and found.seen == () and abs(found.now_ns - at) < 60e9 and not found.copied
    copied.write_bytes(copy_box(copied))  # a copy of a copy is of the same moment
    assert read_trace(copied).header.taken_ns == trace.header.taken_ns
