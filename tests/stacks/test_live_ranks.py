"""Real gloo ranks that hang, wait, lag or train, looked at live through their black boxes and stacks."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import allranks
from allranks.drill.ranks import Ranks, signal
from allranks.model.stacks import StacksReport
from allranks.stacktraces import CollectOptions, Stillness, classify, collect, targets_of
from allranks.stacktraces.debuggers import find_pyspy

pytestmark = pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")

# A rank that hangs stays hung: it is still for longer than this once a few seconds have passed.
STILL = Stillness(still_s=1.0)


def look(ranks: Ranks, folder: Path, stillness: Stillness = STILL, **options: Any) -> StacksReport:
    """A report on all ranks that run."""
    how = CollectOptions(**{"interval_s": 0.5, **options})
    return classify(collect(targets_of(dict(ranks.pids), (folder,)), how), stillness=stillness)


def hang(work: Callable[[int], None]) -> Callable[[int, int, str], None]:
    """A rank program: records, does two healthy steps, says ready, then does `work`."""

    def program(rank: int, world_size: int, folder: str) -> None:
        torch.set_num_threads(1)
        os.chdir(folder)  # what a killed rank leaves behind goes with the test's folder
        allranks.record(folder=Path(folder), job="stacks")
        for number in range(2):
            allranks.step(number)
            dist.all_reduce(torch.ones(1))
        allranks.step(2)
        signal("ready")
        work(rank)

    return program


def _wait_for_others() -> None:
    dist.all_reduce(torch.ones(1))


def load_batch_from_slow_storage() -> None:
    time.sleep(1000)


def _missing(rank: int) -> None:
    if rank == 1:
        load_batch_from_slow_storage()
    _wait_for_others()


def _backward(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    signal("forward")
    if rank == 1:
        load_batch_from_slow_storage()
    loss.backward()


def _store(rank: int) -> None:
    if rank == 1:
        dist.distributed_c10d._get_default_store().get("a key that nobody sets")
    _wait_for_others()


def _polls(rank: int) -> None:
    while rank == 1 and not os.path.exists(f"{os.getcwd()}/flag"):
        time.sleep(0.1)
    _wait_for_others()


def _evaluates(rank: int) -> None:
    data = torch.rand(300, 300)
    while rank == 1:
        data @ data
    _wait_for_others()


def _checkpoint(rank: int) -> None:
    if rank == 0:
        os.mkfifo("fifo")
        torch.save({"weight": torch.ones(4)}, "fifo")
    _wait_for_others()


class _Data:
    """Items that block from the ninth on."""

    def __init__(self, block: Callable[[], None]) -> None:
        self.block = block

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        if index >= 8:
            ctypes.CDLL(None).prctl(1, SIGKILL)  # the worker must not outlive its killed rank
            self.block()
        return 1.0


def _train_on(block: Callable[[], None]) -> None:
    for batch in DataLoader(_Data(block), batch_size=2, num_workers=1):  # type: ignore[arg-type]
        dist.all_reduce(batch)


def _worker_asleep(rank: int) -> None:
    _train_on((lambda: time.sleep(1000)) if rank == 0 else (lambda: None))


def _worker_deadlocked(rank: int) -> None:
    lock = threading.Lock()
    if rank == 0:
        lock.acquire()  # held at the fork: the worker can never get it

    def block() -> None:
        with lock:
            pass

    _train_on(block)


def never_answer() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _remote_call(rank: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path.cwd()}/rpc", rpc_timeout=600)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_async("worker1", never_answer).wait()
    rpc.shutdown()


@pytest.mark.parametrize(
    ("work", "culprit", "causes", "where"),
    [
        (_missing, 1, {0: "collective_wait", 1: "sleep"}, "in load_batch_from_slow_storage"),
        (_store, 1, {0: "collective_wait", 1: "store_wait"}, "in _store"),
        (_polls, 1, {0: "collective_wait", 1: "sleep"}, "in _polls"),
        (_evaluates, 1, {0: "collective_wait", 1: "native_call"}, "in _evaluates"),
        (_checkpoint, 0, {0: "checkpoint_io", 1: "collective_wait"}, "in _checkpoint"),
        (_worker_asleep, 0, {0: "dataloader_wait", 1: "collective_wait"}, "in _train_on"),
        (_worker_deadlocked, 0, {0: "dataloader_wait", 1: "collective_wait"}, "in _train_on"),
        (_remote_call, 1, {0: "p2p_wait", 1: "lock_deadlock"}, "in never_answer"),
    ],
    ids=[
        *("missing rank", "store wait", "flag", "evaluation", "checkpoint to a FIFO", "worker asleep"),
        *("worker deadlocked by fork", "remote call that is not answered"),
    ],
)
def test_the_guilty_rank_of_a_hung_job_is_named(
    work: Callable[[int], None], culprit: int, causes: dict[int, str], where: str, tmp_path: Path
) -> None:
    """Two gloo ranks with black boxes: the marks show the hang, the stacks the culprit."""
    with Ranks(hang(work), world_size=2, args=(str(tmp_path),), timeout_s=600) as ranks:
        ranks.wait_for("ready", timeout_s=100)
        hung = None if work in (_polls, _evaluates) else True
        report = _until_settled(ranks, tmp_path, causes, hung)
        assert {rank: state.cause for rank, state in report.ranks.items()} == causes
        assert report.hung is hung
        assert report.culprits == (culprit,)
        assert report.ranks[culprit].where.endswith(where)
        if work is _polls:
            assert "rank 1 looks again and again for a change in _polls (" in report.sentence
            assert "`rank == 1 and (not os.path.exists(f'{os.getcwd()}/flag'))`" in report.ranks[1].evidence
        if causes[culprit] == "dataloader_wait":
            told = [child.cause for child in report.ranks[culprit].children]
            assert told == ["lock_deadlock" if work is _worker_deadlocked else "sleep"]


def test_a_rank_that_waits_in_backward_is_told_from_native_frames(tmp_path: Path) -> None:
    """DDP's reducer shows no Python frame of a collective; the closer look at a suspect finds it."""
    with Ranks(hang(_backward), world_size=2, args=(str(tmp_path),), timeout_s=600) as ranks:
        ranks.wait_for("forward", timeout_s=100)
        report = _until_settled(ranks, tmp_path, {0: "collective_wait", 1: "sleep"}, True)
        assert report.ranks[0].cause == "collective_wait"
        assert report.culprits == (1,)
        assert report.hung is True


def _until_settled(ranks: Ranks, folder: Path, causes: dict[int, str], hung: bool | None) -> StacksReport:
    """Looks until every rank has gone from `ready` into its wait, at most a few times."""
    for _ in range(12):
        report = look(ranks, folder)
        told = {rank: state.cause for rank, state in report.ranks.items()}
        starved = [state for state in report.ranks.values() if state.cause == "dataloader_wait"]
        if report.hung is hung and told == causes and all(state.children for state in starved):
            break
    return report


def _train(delay_s: dict[int, float]) -> Callable[[int, int, str], None]:
    def program(rank: int, world_size: int, folder: str) -> None:
        torch.set_num_threads(1)
        allranks.record(folder=Path(folder), job="stacks")
        for number in range(100_000):
            allranks.step(number)
            time.sleep(delay_s.get(rank, 0.0))
            dist.all_reduce(torch.ones(1))
            if number == 4:
                signal("ready")

    return program


@pytest.mark.parametrize(
    ("delays", "slow"), [({0: 0.02, 1: 0.02}, ()), ({1: 0.3}, (1,))], ids=["healthy", "straggler"]
)
def test_a_job_that_moves_is_never_called_hung(
    delays: dict[int, float], slow: tuple[int, ...], tmp_path: Path
) -> None:
    """Snapshots of a straggler look like a hang; the marks say otherwise, and the straggler is named."""
    patient = Stillness(still_s=60.0)
    with Ranks(_train(delays), world_size=3, args=(str(tmp_path),), timeout_s=600) as ranks:
        ranks.wait_for("ready", timeout_s=100)
        reports = []
        for _ in range(5):
            reports.append(look(ranks, tmp_path, patient, rounds=5, interval_s=0.4, native="never"))
            if reports[-1].hung is False and reports[-1].culprits == slow:
                break
        assert all(report.hung is not True for report in reports)
        assert reports[-1].hung is False
        assert reports[-1].culprits == slow
        wanted = "slow" if slow else "healthy"
        assert all(reports[-1].ranks[rank].cause == wanted for rank in (slow or (0, 1, 2)))


def test_a_look_does_not_disturb_training(tmp_path: Path) -> None:
    """Steps go on during and after a full look, native frames included."""
    with Ranks(_train({0: 0.01}), world_size=2, args=(str(tmp_path),), timeout_s=600) as ranks:
        ranks.wait_for("ready", timeout_s=100)
        before = {one.rank: one.marks[-1].step for one in _marks(ranks, tmp_path)}
        look(ranks, tmp_path, native="all")
        for _ in range(200):
            after = {one.rank: one.marks[-1].step for one in _marks(ranks, tmp_path)}
            if all(after[rank] > before[rank] + 5 for rank in before):
                break
            time.sleep(0.05)
        assert all(after[rank] > before[rank] + 5 for rank in before)


def _marks(ranks: Ranks, folder: Path) -> tuple[Any, ...]:
    return collect(targets_of(dict(ranks.pids), (folder,)), CollectOptions(rounds=1, native="never")).marks
