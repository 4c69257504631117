"""Replicas of two ranks that communicate with each other in every step: a lost replica must not part them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as mark
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel

from .cluster import LIMIT_S, LighthouseProcess, batch
from .faults import Fault, FaultPlan, inject

TOGETHER = 3  # steps of both replicas before one is killed


def _sharded(model: nn.Module, manager: torchft.Manager | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if manager is None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model
    return torchft.replicate(manager, model)


def _tensor_parallel(model: nn.Module, manager: torchft.Manager | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if manager is None:
        mesh = init_device_mesh("cpu", (2,))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return DistributedDataParallel(manager, model, bucket_cap_mb=0.0005)


def _train(
    rank: int, world: int, address: str, folder: Path, shape: str, waits: int, half: bool = False
) -> tuple[int, list[float], int]:
    """Trains until the other replica was lost and three more steps were made. `half`: only its rank 1 is killed, in a vote
    that one other has heard."""
    torch.set_num_threads(1)
    replica, inner = divmod(rank, 2)
    os.environ.update(RANK=str(inner), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{replica}", rank=inner, world_size=2)
    torch.manual_seed(5 + replica)
    arrange = {"sharded": _sharded, "tensor parallel": _tensor_parallel}[shape]
    model = arrange(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    inner_optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner_optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner_optimizer.state_dict()},
        min_replica_size=1, lighthouse_addr=address, replica_id=f"r{replica}", timeout=30, quorum_timeout=30,
    )  # fmt: skip
    injector = inject(manager, FaultPlan())
    wrapped, optimizer = arrange(model, manager), torchft.Optimizer(manager, inner_optimizer)
    together, alone, retries = 0, 0, 0
    while not (together >= TOGETHER and alone >= 3):
        if together == TOGETHER and not alone and not retries and replica == 0 and inner == waits:
            _wait_for_loss(manager)
        optimizer.zero_grad()
        wrapped(batch(manager.current_step() * world + replica, 8)).square().mean().backward()
        committed = optimizer.step()
        participants = manager.num_participants()  # also after a step that failed
        retries += not committed
        together += committed and participants == 2
        alone += committed and participants == 1
        if replica == 1 and together == TOGETHER and not half:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3 and together == TOGETHER and not injector.left:
            injector.left.append(Fault("kill", "r1", at="half vote"))
    found = [p.to_local().double().sum().item() for p in model.parameters()]
    manager.shutdown()
    dist.destroy_process_group()
    return manager.current_step(), found, retries


def _wait_for_loss(manager: torchft.Manager) -> None:
    """Until this rank knows that its group is broken; the other rank of its replica may not know yet."""
    generation = manager.training.generation
    assert generation is not None
    deadline = time.monotonic() + LIMIT_S
    while generation.usable and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("shape", ["sharded", "tensor parallel"])
@pytest.mark.parametrize("waits", [-1, 0, 1])
def test_both_ranks_of_a_replica_go_on_together_after_the_other_replica_was_killed(
    tmp_path: Path, shape: str, waits: int
) -> None:
    """Whichever of them hears of it first (`waits`: that one knows before its step begins)."""
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as lighthouse:
        args = (lighthouse.address, tmp_path, shape, waits)
        with Ranks(_train, 4, args=args, backend=None) as ranks:
            outcomes = ranks.join(LIMIT_S)
    codes = [outcomes[rank].exit_code for rank in range(4)]
    errors = "\n".join(outcome.error for outcome in outcomes.values())
    assert codes[:2] == [0, 0], errors
    assert -signal.SIGKILL in codes[2:], errors  # with it the other has lost its replica, and ends
    (step, first, _), (other, second, _) = outcomes[0].value, outcomes[1].value
    assert step == other >= TOGETHER + 3
    assert first != second  # each holds its own part


def test_a_replica_that_has_lost_a_rank_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Its other rank does not know whether the step is committed, and nobody else of its replica can say."""
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as lighthouse:
        args = (lighthouse.address, tmp_path, "tensor parallel", -1, True)
        with Ranks(_train, 4, args=args, backend=None) as ranks:
            outcomes = ranks.join(LIMIT_S)
    codes = [outcomes[rank].exit_code for rank in range(4)]
    assert codes == [0, 0, 1, -signal.SIGKILL], "\n".join(outcome.error for outcome in outcomes.values())
    assert "rank 1 of this replica died" in outcomes[2].error


def _train_and_heal(rank: int, world: int, address: str, folder: Path) -> list[int]:
    """Both ranks of r1 stop after a few steps. When they continue, rank 1 does not receive before r0 is dead."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, filename=folder / f"log-{rank}", force=True)
    replica, inner = divmod(rank, 2)
    os.environ.update(RANK=str(inner), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{replica}", rank=inner, world_size=2)
    model, more = (
        nn.Linear(8, 4),
        torch.zeros(8 << 20),
    )  # more than lies in buffers of sockets when its sender dies
    manager = torchft.Manager(
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict(), "more": more},
        min_replica_size=1, lighthouse_addr=address, replica_id=f"r{replica}", timeout=30, quorum_timeout=30,
    )  # fmt: skip

    def fire(fault: Fault) -> None:
        mark(f"fired {fault.kind}")
        while fault.kind == "hang" and not (folder / "r0 is dead").exists():
            time.sleep(0.005)

    faults = [Fault("stop", "r1"), Fault("hang", "r1", at="receiving state", for_s=0.0)][: 1 + inner]
    injector = inject(manager, FaultPlan(), on_fire=fire)
    wrapped = DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.05))
    together, alone = 0, 0
    steps: list[int] = []
    while replica == 0 or alone < 3:
        optimizer.zero_grad()
        wrapped(batch(manager.current_step(), 8)).square().mean().backward()
        if not optimizer.step():
            continue
        participants = manager.num_participants()
        steps.append(manager.current_step())
        (folder / f"steps-{rank}").write_text(str(steps[-1]))
        together += participants == 2
        alone += participants == 1 and together >= TOGETHER
        if replica == 1 and together == TOGETHER:
            injector.left.extend(faults)
            together += 1
    manager.shutdown()
    dist.destroy_process_group()
    return steps


def test_no_rank_replaces_its_state_before_all_ranks_of_its_replica_have_received_the_other(
    tmp_path: Path,
) -> None:
    """r1 returns from a freeze; r0 dies when one rank of r1 has all of its state and the other nothing: r1's own counts."""
    options = Options(min_replicas=1, heartbeat_timeout_s=1.0, presume_dead_s=0.5, join_timeout_s=1.0)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def healed() -> int:
        return (tmp_path / "log-2").read_text().count("healed: ")

    def step(rank: int) -> int:
        return int((tmp_path / f"steps-{rank}").read_text() or "0")

    with (
        LighthouseProcess(options) as lighthouse,
        Ranks(_train_and_heal, 4, args=(lighthouse.address, tmp_path), backend=None) as ranks,
    ):
        ranks.wait_for("fired stop", [2, 3], timeout_s=LIMIT_S)
        held, before = step(2), healed()
        wait_for(lambda: step(0) >= held + 5)
        for rank in (2, 3):
            ranks.kill(rank, signal.SIGCONT)
        ranks.wait_for("fired hang", [3], timeout_s=LIMIT_S)
        wait_for(lambda: healed() > before)
        for rank in (0, 1):
            ranks.kill(rank)
        (tmp_path / "r0 is dead").touch()
        outcomes = ranks.join(LIMIT_S)
    assert [outcomes[rank].exit_code for rank in range(4)] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0], (
        outcomes
    )
    assert outcomes[2].value == outcomes[3].value
    assert outcomes[2].value[-3:] == [held + 1, held + 2, held + 3]
