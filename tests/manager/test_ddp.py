"""The DDP wrapper: the mean is right, buckets overlap with the backward, odd steps stay in line."""

from __future__ import annotations

import math
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as mark
from allranks.errors import ConfigurationError
from allranks.lighthouse.options import Options
from allranks.manager.ddp import cut

from .cluster import LIMIT_S, LighthouseProcess, batch


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=2.0)) as running:
        yield running


def make_manager(address: str, name: str, **options: Any) -> torchft.Manager:
    torch.set_num_threads(1)
    return torchft.Manager(
        min_replica_size=2, lighthouse_addr=address, replica_id=name, rank=0, world_size=1, timeout=30,
        quorum_timeout=30, **options,
    )  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _mean(rank: int, world: int, address: str) -> bool:
    manager = make_manager(address, f"r{rank}", init_sync=False)
    expected = []
    for other in range(world):
        model = net()
        model(batch(other, 8)).square().mean().backward()
        expected.append(gradients(model))
    model = net()
    ddp = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.01)
    manager.start_quorum()
    ddp(batch(rank, 8)).square().mean().backward()
    found = gradients(model)
    committed = manager.should_commit()
    manager.shutdown()
    right = all(
        torch.allclose(one, (first + second) / 2, atol=1e-7)
        for one, first, second in zip(found, *expected, strict=True)
    )
    return right and committed and len(ddp._buckets) > 2


def test_gradients_are_the_mean_right_after_the_backward(lighthouse: LighthouseProcess) -> None:
    """Ready for clipping: averaged when backward returns, not only at the vote."""
    with Ranks(_mean, 2, args=(lighthouse.address,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [True, True]


def _overlap(rank: int, world: int, address: str) -> list[str]:
    manager = make_manager(address, f"r{rank}")
    model, seen = net(), []
    ddp = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.01)
    model[0].weight.register_hook(lambda gradient: seen.append("first layer's gradient"))
    real = manager._allreduce
    manager._allreduce = lambda *args: (seen.append("reduce"), real(*args))[1]  # type: ignore[method-assign]
    for _ in range(2):  # in the first, collectives wait for the one that heals
        seen.clear()
        manager.start_quorum()
        ddp(batch(rank, 8)).square().mean().backward()
        manager.should_commit()
    manager.shutdown()
    return seen


def test_buckets_are_reduced_while_the_backward_still_runs(lighthouse: LighthouseProcess) -> None:
    """The last layers' bucket is on its way before the first layer has its gradient."""
    with Ranks(_overlap, 2, args=(lighthouse.address,), backend=None) as ranks:
        for seen in ranks.values(LIMIT_S):
            assert "reduce" in seen[: seen.index("first layer's gradient")]


def _spent(rank: int, world: int, address: str) -> list[list[bool]]:
    manager, model = make_manager(address, f"r{rank}"), net()
    made: list[weakref.ref[torch.Tensor]] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: made.append(weakref.ref(p.grad)))
    ddp = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.01)
    seen = []
    for _ in range(3):
        manager.start_quorum()
        model.zero_grad()
        ddp(batch(rank, 8)).square().mean().backward()
        seen.append([one() is not None for one in made])
        assert manager.should_commit()
    manager.shutdown()
    return seen


def test_local_gradients_are_let_go_when_the_next_are_there(lighthouse: LighthouseProcess) -> None:
    """Not before: their memory would go back to the kernel in every step. Not later: it would add up."""
    with Ranks(_spent, 2, args=(lighthouse.address,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [[[True], [False, True], [False, False, True]]] * 2


class Branching(nn.Module):
    """Uses only one of its branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x)  # type: ignore[no-any-return]


def _unused(rank: int, world: int, address: str) -> list[float]:
    manager = make_manager(address, f"r{rank}", init_sync=False)
    torch.manual_seed(1)
    model = Branching()
    ddp = torchft.DistributedDataParallel(manager, model)
    manager.start_quorum()
    ddp(torch.ones(1, 8), rank).sum().backward()  # every replica takes another branch
    found = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    assert manager.should_commit()
    manager.start_quorum()
    model.zero_grad()
    if rank == 0:  # a step without a backward: the other must not wait forever
        ddp(torch.ones(1, 8), 0).sum().backward()
    assert manager.should_commit()
    manager.shutdown()
    return found


def test_unused_parameters_and_steps_without_a_backward_stay_in_line(lighthouse: LighthouseProcess) -> None:
    """Missing gradients count as zero; nobody waits for them. Where nobody has one there is none."""
    with Ranks(_unused, 2, args=(lighthouse.address,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [[16.0, 2.0, 16.0, 2.0]] * 2


def test_who_gives_nothing_has_the_gradients_that_the_others_have() -> None:
    """Not its own: the optimizers must step the same parameters."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    (mine,), (others,) = (cut([used, unused], 1 << 20) for _ in range(2))
    used.grad = torch.full((3,), 5.0)
    given = others.fill(1)
    used.grad, unused.grad = None, torch.ones(2)
    mine.empty().add_(given)
    mine.spread()
    assert used.grad is not None and used.grad.tolist() == [5.0] * 3
    assert unused.grad is None


def _unfrozen(rank: int, world: int, address: str) -> list[float]:
    manager = make_manager(address, f"r{rank}", init_sync=False)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    ddp = torchft.DistributedDataParallel(manager, model)
    found = []
    for step in range(3):
        if step + rank > 1:  # a replica that has just joined may not have come to that yet
            model[0].requires_grad_(True)
        manager.start_quorum()
        model.zero_grad()
        ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
        found.append(float("nan") if model[0].weight.grad is None else float(model[0].weight.grad.sum()))
        assert manager.should_commit()
    manager.shutdown()
    return found


def test_parameters_that_are_unfrozen_later_are_reduced_too(lighthouse: LighthouseProcess) -> None:
    """From the step at which the first replica has unfrozen them."""
    with Ranks(_unfrozen, 2, args=(lighthouse.address,), backend=None) as ranks:
        first, second = ranks.values(LIMIT_S)
    assert str(first) == str(second)
    assert math.isnan(first[0])
    assert first[2] == pytest.approx(first[1] * 1.5)  # rank 1's alone, over 2; then the mean of both


def test_a_model_of_which_everything_was_frozen_cannot_be_unfrozen_later(
    lighthouse: LighthouseProcess,
) -> None:
    """No gradient would be averaged: the forward says so."""
    model = nn.Linear(2, 1).requires_grad_(False)
    ddp = torchft.DistributedDataParallel(make_manager(lighthouse.address, "r0"), model)
    ddp(torch.ones(1, 2))
    model.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="unfrozen"):
        ddp(torch.ones(1, 2))


def _sparse(rank: int, world: int, address: str) -> list[tuple[list[int], list[float]]]:
    manager = make_manager(address, f"r{rank}", init_sync=False)
    model = nn.Sequential(nn.Embedding(6, 1, sparse=True), nn.Linear(1, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    ddp = torchft.DistributedDataParallel(manager, model)
    adam = torch.optim.SparseAdam(model[0].parameters())
    found = []
    for rows in ([[0, 1, 1], [1, 4, 5]], [[2], []]):
        manager.start_quorum()
        model.zero_grad()
        if rows[rank]:
            ddp(torch.tensor(rows[rank])).mul(torch.arange(len(rows[rank])).view(-1, 1)).sum().backward()
        assert manager.should_commit()
        gradient = model[0].weight.grad
        assert gradient is not None
        gradient = gradient.coalesce()
        found.append((gradient.indices()[0].tolist(), gradient.values().view(-1).tolist()))
        adam.step()
    manager.shutdown()
    return found


def test_sparse_gradients_stay_sparse(lighthouse: LighthouseProcess) -> None:
    """The rows that any replica has used, also those with a gradient of zero: SparseAdam changes these and no others."""
    with Ranks(_sparse, 2, args=(lighthouse.address,), backend=None) as ranks:
        results = ranks.values(LIMIT_S)
    assert results == [[([0, 1, 4, 5], [0.0, 1.5, 0.5, 1.0]), ([2], [0.0])]] * 2


def _no_sync(rank: int, world: int, address: str) -> float:
    manager = make_manager(address, f"r{rank}", init_sync=False)
    torch.manual_seed(1)
    model = nn.Linear(1, 1, bias=False)
    ddp = torchft.DistributedDataParallel(manager, model)
    manager.start_quorum()
    with ddp.no_sync():
        ddp(torch.tensor([[1.0 + rank]])).sum().backward()
    ddp(torch.tensor([[10.0]])).sum().backward()
    assert manager.should_commit()
    manager.shutdown()
    return float(model.weight.grad.item())  # type: ignore[union-attr]


def test_accumulated_gradients_are_reduced_once(lighthouse: LighthouseProcess) -> None:
    """no_sync adds up locally: (1 + 10 + 2 + 10) / 2."""
    with Ranks(_no_sync, 2, args=(lighthouse.address,), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [11.5, 11.5]


def test_buckets_are_cut_alike_everywhere_and_never_mix_types() -> None:
    """Reverse order, a small first bucket, one dtype each."""
    parameters = [nn.Parameter(torch.zeros(300_000)) for _ in range(6)]
    parameters.append(nn.Parameter(torch.zeros(10, dtype=torch.float64)))
    buckets = cut(parameters, 3 << 20)
    assert [len(bucket.parameters) for bucket in buckets] == [1, 2, 2, 2]
    assert buckets[0].parameters[0].dtype == torch.float64
    assert [p for bucket in buckets for p in bucket.parameters] == list(reversed(parameters))


def test_unknown_options_are_refused() -> None:
    """A typing error does not silently do nothing."""
    manager = torchft.Manager(lighthouse_addr="127.0.0.1:1", rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match="bucket_size"):
        torchft.DistributedDataParallel(manager, nn.Linear(1, 1), bucket_size=3)


def _with_child(rank: int, world: int, address: str, folder: Path) -> int:
    manager = make_manager(address, f"r{rank}")
    manager.options.__dict__["min_replica_size"] = 1  # may train alone once the other is dead
    model = net()
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    together = alone = 0
    while alone < 3:
        optimizer.zero_grad()
        ddp(batch(manager.current_step(), 8)).square().mean().backward()
        count = manager.num_participants()
        if optimizer.step():
            together += count == 2
            alone += together > 0 and count == 1
        if rank == 1 and together == 3:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            (folder / "child").write_text(str(child))
            mark("forked")
            os.kill(os.getpid(), signal.SIGKILL)
    found = manager.num_participants()
    manager.shutdown()
    return found


def test_a_forked_child_of_a_dead_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    """DataLoader workers inherit sockets; they let go of them, so the others notice at once."""
    lighthouse = LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=30.0)).start()
    with lighthouse, Ranks(_with_child, 2, args=(lighthouse.address, tmp_path), backend=None) as ranks:
        ranks.wait_for("forked", [1], timeout_s=LIMIT_S)
        try:
            outcomes = ranks.join(LIMIT_S)
            os.kill(int((tmp_path / "child").read_text()), 0)  # it lives
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert (outcomes[0].exit_code, outcomes[0].value) == (0, 1), outcomes[0].error


def _sharded(rank: int, world: int, address: str, folder: Path) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    replica, inner = divmod(rank, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{replica}", rank=inner, world_size=2)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = torchft.Manager(
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, min_replica_size=1, rank=inner,
        world_size=2, lighthouse_addr=address, replica_id=f"r{replica}", timeout=30, quorum_timeout=30,
    )  # fmt: skip
    torchft.replicate(manager, model)
    optimizer = torchft.Optimizer(manager, plain)
    alone = 0
    while alone < 5:
        optimizer.zero_grad()
        model(batch(manager.current_step(), 8)).square().mean().backward()
        together = manager.num_participants()
        if optimizer.step():
            mark(f"trained with {together}")
            alone = alone + 1 if together == 1 and (folder / "killed").exists() else 0
    manager.shutdown()
    return manager.current_step()


def test_a_sharded_replica_that_loses_one_rank_goes_as_a_whole(tmp_path: Path) -> None:
    """One rank of r1 is killed: both ranks of r0 go on, in step with each other."""
    lighthouse = LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)).start()
    with lighthouse, Ranks(_sharded, 4, args=(lighthouse.address, tmp_path), backend=None) as ranks:
        ranks.wait_for("trained with 2", timeout_s=LIMIT_S)
        (tmp_path / "killed").touch()
        ranks.kill(3)
        outcomes = ranks.join(LIMIT_S)
    assert outcomes[3].exit_code == -signal.SIGKILL
    assert outcomes[2].exit_code != 0
    assert [outcomes[rank].exit_code for rank in (0, 1)] == [0, 0], (outcomes[0].error, outcomes[1].error)
    assert outcomes[0].value == outcomes[1].value
