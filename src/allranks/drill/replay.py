"""Runs a replay under the recorder, and checks that it hangs like the recorded job. Forks the processes from the caller."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.diagnosis.replay import ReplayPlan
from allranks.drill.ranks import Ranks
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Diagnosis, RankNow
from allranks.watch.samples import read_samples

QUIET_S = 1.5  # without progress, the replay hangs
START_S, LIMIT_S = 60.0, 120.0
STACK_DEPTH = "40"  # recorded frames per call


@dataclass(frozen=True)
class ReplayResult:
    """The verdict on a replay."""

    diagnosis: Diagnosis
    cause: str
    ranks: tuple[int, ...]  # numbers in the recorded job
    same: bool  # equal to the verdict on the recorded job

    @property
    def sentence(self) -> str:
        found = self.diagnosis.verdict
        return found.sentence if found is not None else "nothing wrong"


def run_replay(plan: ReplayPlan, script: Path) -> ReplayResult:
    """Runs the script until it makes no progress, and compares the verdict with the recorded job's."""
    import torch.distributed  # noqa: F401  # before the fork

    with tempfile.TemporaryDirectory(prefix="allranks-replay-") as name:
        folder = Path(name)
        env = {"ALLRANKS_DIR": name, "ALLRANKS_STACK_DEPTH": STACK_DEPTH}
        with Ranks(_record, len(plan.ranks), args=(str(script),), backend=None, env=env) as ranks:
            _wait(folder, list(ranks.pids.values()))
            diagnosis = _judge(plan, folder, ranks.pids)
    verdict = diagnosis.verdict
    cause, processes = (verdict.cause, verdict.ranks) if verdict is not None else ("", ())
    expected = plan.verdict.cause if plan.verdict is not None else ""
    named = tuple(sorted(plan.ranks[process] for process in processes if process < len(plan.ranks)))
    return ReplayResult(diagnosis, cause, named, (cause, processes) == (expected, plan.guilty))


def _record(rank: int, world: int, script: str) -> None:
    """Runs the script under the recorder, in a rank."""
    from allranks.recording import record

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    recorder = record()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # of the recorder, which stores the exception
        os._exit(1)
    recorder.close("exit")


def _wait(folder: Path, pids: Sequence[int]) -> None:
    """Waits until no rank makes progress, or all processes have ended."""
    last: list[tuple[int, tuple[int, int, int], bool]] = []
    begin = moved = time.monotonic()
    while (now := time.monotonic()) - begin < LIMIT_S:
        samples = read_samples(folder)
        marks = [(sample.rank, sample.mark, sample.joined) for sample in samples]
        if marks != last or any(process_state(pid) == "R" for pid in pids):
            last, moved = marks, now
        ended = all(process_state(pid) in ("Z", "X", "") for pid in pids)
        begun = len(samples) == len(pids) or now - begin > START_S
        if ended or (begun and now - moved > QUIET_S):
            return
        time.sleep(0.05)


def _judge(plan: ReplayPlan, folder: Path, pids: dict[int, int]) -> Diagnosis:
    """The diagnosis of the black boxes, without those of ranks that the recorded job has no file of."""
    ended = [rank for rank, pid in pids.items() if process_state(pid) in ("Z", "X", "")]
    recorded = set(range(len(pids))) - set(plan.unrecorded)
    boxes = [sample.path for sample in read_samples(folder) if sample.rank in recorded]
    finished = len(ended) == len(pids)
    gone = [RankNow(rank, "gone", "", "its process is gone") for rank in ended if rank in recorded]
    loaded = load_paths(boxes, LoadOptions(allow_nothing=True))
    options = DiagnoseOptions(now_ns=0 if finished else time.time_ns(), ended=finished)
    return diagnose(loaded.traces, loaded.files, stacks=() if finished else gone, options=options)
