"""Before the first step and between two: backwards stay local, questions are answered at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.errors import ManagerError
from allranks.lighthouse.options import Options

from .cluster import LIMIT_S, LighthouseProcess


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=2.0)) as running:
        yield running


def make_manager(address: str = "127.0.0.1:1", name: str = "r0") -> torchft.Manager:
    torch.set_num_threads(1)
    return torchft.Manager(
        load_state_dict=lambda state: None, state_dict=dict, min_replica_size=2, lighthouse_addr=address,
        replica_id=name, rank=0, world_size=1, timeout=30, quorum_timeout=30,
    )  # fmt: skip


def _warms_up(rank: int, world: int, address: str) -> list[float]:
    """The gradient of a weight after each backward; replicas see inputs of 1 and 3."""
    manager, model = make_manager(address, f"r{rank}"), nn.Linear(1, 1, bias=False)
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.0))
    x, found = torch.full((1, 1), 1.0 + 2 * rank), []

    def backward() -> None:
        model.zero_grad()
        ddp(x).sum().backward()
        assert model.weight.grad is not None
        found.append(float(model.weight.grad))

    backward()
    manager.start()
    backward()
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        assert optimizer.step()
        backward()
    manager.shutdown()
    backward()
    return found


def test_a_backward_outside_a_step_keeps_its_gradients_to_itself(lighthouse: LighthouseProcess) -> None:
    """Before the manager is open, before the first step, between two and after the end."""
    with Ranks(_warms_up, 2, args=(lighthouse.address,), backend=None) as ranks:
        first, second = ranks.values(LIMIT_S)
    assert first == [1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.0]
    assert second == [3.0, 3.0, 2.0, 3.0, 2.0, 3.0, 3.0]


def test_questions_before_the_first_quorum_are_answered_at_once() -> None:
    """As torchft does: nobody takes part yet."""
    manager = make_manager()
    group = torchft.ManagedProcessGroup(manager)
    assert manager.num_participants() == 0
    assert manager.participating_rank() is None
    assert manager.is_participating() is False
    assert (manager.current_step(), manager.batches_committed(), manager.quorum_id()) == (0, 0, 0)
    assert (group.size(), group.rank()) == (0, 0)
    assert manager.errored() is None


@pytest.mark.parametrize("call", [lambda m: m.allreduce(torch.ones(1)), lambda m: m.should_commit()])
def test_a_collective_before_the_first_step_names_the_missing_call(call: object) -> None:
    """Nobody would answer it."""
    with pytest.raises(ManagerError, match="start_quorum"):
        call(make_manager())  # type: ignore[operator]
