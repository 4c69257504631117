"""A rank that never comes while the others wait on the GPU for calls that are only queued: certain, not a matter of time.

The black boxes are of a real job on nccl2 (scripts/gpu_hangs.py). In their stacks a wait for the device may look like work.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.incidents.stall import Activity, Look, StallLimits, StallOutcome, ThreadWait, judge_stall
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Finding, RankNow
from allranks.model.stacks import RankState, StackFrame, StacksReport
from allranks.stacktraces.classify import find_culprits

PACKED = Path(__file__).parents[1] / "diagnose" / "nccl2_hangs" / "two_ranks_are_stuck.tar.xz"
LIMITS = StallLimits(hung_s=90.5, cap_s=300.0)
SLEEP, LOCK = ThreadWait(10_000.0, inside=False), ThreadWait(-1.0, inside=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    with tarfile.open(PACKED) as archive:
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in Debian's 3.11.2
        archive.extractall(folder, **safe)
    return folder


def verdict_on(job: Path, states: dict[int, RankState]) -> Finding | None:
    known = json.loads((job / "truth.json").read_text())
    loaded = load_paths(sorted(map(str, job.glob("boxes/*.box"))), LoadOptions())
    seen = [RankNow(state.rank, state.cause, state.where, state.evidence) for state in states.values()]
    options = DiagnoseOptions(now_ns=known["now_ns"])
    return diagnose(loaded.traces, loaded.files, stacks=seen, options=options).verdict


def judged(job: Path, cause: str, activity: Activity, other: str) -> tuple[StallOutcome, tuple[int, ...]]:
    """After 15 s: those who never came are in `cause`, the rest in a call of CUDA."""
    known = json.loads((job / "truth.json").read_text())
    stuck = tuple(known["ranks"])
    states = {
        rank: RankState(
            rank,
            cause if rank in stuck else other,
            "train.py:14 in load_next_shard" if rank in stuck else "train.py:30 in loss_of",
            "",
            stack=(StackFrame("load_next_shard" if rank in stuck else "loss_of", "train.py", 14),),
        )
        for rank in range(known["processes"])
    }
    report = StacksReport(True, find_culprits(states), "", states)
    finding, seen = verdict_on(job, states), dict.fromkeys(stuck, activity)
    looks = [Look(at, at, report, False, finding=finding, activity=seen) for at in (10.0, 12.5, 15.0)]
    return judge_stall(looks, LIMITS), stuck


@pytest.mark.parametrize("other", ["native_call", "cuda_wait", "collective_wait"])
@pytest.mark.parametrize(
    ("cause", "thread", "reason"),
    [
        ("sleep", SLEEP, "sleeps, and nothing in it moves for another"),
        ("lock_deadlock", LOCK, "waits without limit"),
    ],
)
def test_a_rank_that_cannot_wake_is_a_hang_at_once(
    job: Path, cause: str, thread: ThreadWait, reason: str, other: str
) -> None:
    found, stuck = judged(job, cause, Activity(5, (thread,)), other)
    assert (found.state, found.certain) == ("hung", True)
    assert reason in found.reason and f"rank {stuck[0]} at train.py:14" in found.reason


@pytest.mark.parametrize("other", ["native_call", "cuda_wait"])
def test_a_rank_that_loops_may_still_end_by_itself(job: Path, other: str) -> None:
    """And it is the one that is named, not those who wait."""
    loops = Activity(900, (ThreadWait(None, inside=False, still=False),))
    found, stuck = judged(job, "busy_python", loops, other)
    assert (found.state, found.certain) == ("stalled", False)
    assert f"rank {stuck[0]} runs Python code at train.py:14" in found.reason
    assert "loss_of" not in found.reason
