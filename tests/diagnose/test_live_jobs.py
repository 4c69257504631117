"""Real gloo jobs with real faults, recorded in black boxes and diagnosed from outside while they hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as tell
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import State

torch = pytest.importorskip("torch")
WORLD = 3


def _job(rank: int, world: int, fault: str) -> None:
    """Five healthy rounds, then one fault, then everybody continues."""
    import torch.distributed as dist

    import allranks

    allranks.record()
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], group_desc="pair")
    tensor = torch.ones(8)
    for number in range(5):
        allranks.step(number)
        if rank < 2:
            dist.all_reduce(tensor, group=pair)
        dist.all_reduce(tensor)
    tell("warm")
    _commit(fault, rank, tensor, pair)
    for _ in range(2):
        dist.all_reduce(tensor)
    tell("through")
    time.sleep(600)


def _commit(fault: str, rank: int, tensor: object, pair: object) -> None:
    import torch.distributed as dist

    if fault == "missing" and rank == 1:
        time.sleep(600)
    elif fault == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "size":
        dist.all_reduce(torch.ones(16 if rank == 2 else 8))
    elif fault == "type":
        if rank == 2:
            dist.broadcast(tensor, 0)
        else:
            dist.all_gather([torch.empty(8) for _ in range(WORLD)], tensor)
    elif fault == "extra" and rank == 0:
        dist.all_reduce(tensor)
    elif fault == "root":
        dist.broadcast(tensor, 2 if rank == 2 else 0)
    elif fault == "reduce_op":
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
    elif fault == "crossed" and rank < 2:
        dist.recv(tensor, 1 - rank)
    elif fault == "splits":
        gives = [(rank + peer) % WORLD + 1 for peer in range(WORLD)]
        takes = list(gives)
        gives[2] += rank == 1  # rank 2 expects one element less
        dist.all_to_all_single(torch.empty(sum(takes)), torch.ones(sum(gives)), takes, gives)
    elif fault == "subgroup" and rank < 2:
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(tensor, group=pair)  # 0 waits here for 1; 2 waits in the world group for both


def _until_told(folder: Path, limit_s: float = 60.0, *, lost: bool = False) -> Diagnosis:
    """Looks again and again until there is a verdict, and with `lost` until a rank has lost another in a call."""
    deadline = time.monotonic() + limit_s
    while True:
        loaded = load_paths([str(folder)])
        if lost and not any((trace.calls["state"] == State.FAILED).any() for trace in loaded.traces):
            assert time.monotonic() < deadline, "no call has failed"
            time.sleep(0.2)
            continue
        result = diagnose(loaded.traces, loaded.files, options=DiagnoseOptions(now_ns=time.time_ns()))
        if result.status == "fault" or time.monotonic() > deadline:
            return result
        time.sleep(0.2)


FAULTS = {
    "missing": ("missing_rank", (1,), "default_pg"),
    "killed": ("rank_died", (1,), "default_pg"),
    "size": ("size_mismatch", (2,), "default_pg"),
    "type": ("type_mismatch", (2,), "default_pg"),
    "extra": ("extra_collective", (0,), "default_pg"),
    "root": ("root_mismatch", (2,), "default_pg"),
    "reduce_op": ("reduce_op_mismatch", (1,), "default_pg"),
    "crossed": ("p2p_mismatch", (0, 1), "default_pg"),
    "splits": ("size_mismatch", (1,), "default_pg"),
    "subgroup": ("missing_rank", (1,), None),  # it lacks in both groups; who came first is named
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_real_job_with_a_real_fault_gets_the_right_verdict(fault: str, tmp_path: Path) -> None:
    """Cause, guilty rank and group, from the black boxes alone."""
    with Ranks(_job, WORLD, args=(fault,), backend=None, env={"ALLRANKS_DIR": str(tmp_path)}) as ranks:
        ranks.wait_for("warm", timeout_s=90)
        # Until the others lose a killed rank, it is one that has not come yet.
        result = _until_told(tmp_path, lost=fault == "killed")
    assert result.verdict is not None, result.findings
    verdict = result.verdict
    cause, guilty, group = FAULTS[fault]
    assert (verdict.cause, verdict.ranks) == (cause, guilty), verdict.sentence
    assert group in (None, verdict.group)
    assert verdict.where == "" or "test_live_jobs.py" in verdict.where


def test_a_real_healthy_job_has_nothing_wrong_while_it_runs(tmp_path: Path) -> None:
    """All ranks are through, and none is accused."""
    with Ranks(_job, WORLD, args=("none",), backend=None, env={"ALLRANKS_DIR": str(tmp_path)}) as ranks:
        ranks.wait_for("through", timeout_s=90)
        loaded = load_paths([str(tmp_path)])
        result = diagnose(loaded.traces, loaded.files, options=DiagnoseOptions(now_ns=time.time_ns()))
    assert (result.status, result.verdict) == ("ok", None)
