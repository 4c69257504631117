"""The other ways to train: LocalSGD, DiLoCo, sharded replicas, managed groups and meshes, spares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.errors import ConfigurationError
from allranks.lighthouse.options import Options

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=2.0)) as running:
        yield running


@dataclass
class Setup:
    """A tiny model and a manager for one rank."""

    address: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, torchft.Manager]:
        torch.set_num_threads(1)
        torch.manual_seed(len(self.name) + ord(self.name[-1]))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"rank": 0, "world_size": 1, "timeout": 30, "quorum_timeout": 30, **self.options}
        manager = torchft.Manager(
            min_replica_size=2, lighthouse_addr=self.address, replica_id=self.name, **options
        )
        return model, optimizer, manager


def run(function: Any, world: int, *args: Any) -> list[Any]:
    with Ranks(function, world, args=args, backend=None) as ranks:
        return ranks.values(LIMIT_S)


def _local_sgd(rank: int, world: int, address: str) -> tuple[str, int]:
    model, optimizer, manager = Setup(address, f"r{rank}", {"use_async_quorum": False}).make()
    with torchft.LocalSGD(manager, model, optimizer, sync_every=3):
        for step in range(12):
            optimizer.zero_grad()
            model(batch(100 * rank + step, 8)).square().mean().backward()
            optimizer.step()
    result = fingerprint(model, optimizer), manager.current_step()
    manager.shutdown()
    return result


def test_local_sgd_leaves_equal_parameters_after_each_synchronisation(lighthouse: LighthouseProcess) -> None:
    """Other data, other initial weights: after the last mean all hold the same bits."""
    results = run(_local_sgd, 2, lighthouse.address)
    assert results[0] == results[1]
    assert results[0][1] == 4


def _diloco(rank: int, world: int, address: str, delay: int, alpha: float) -> tuple[list[Any], int]:
    model, optimizer, manager = Setup(address, f"r{rank}", {"use_async_quorum": False}).make()
    fragments = [model[0], model[2]]
    outers = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    with torchft.DiLoCo(
        manager,
        fragments,
        optimizer,
        outers,
        sync_every=4,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    ) as diloco:
        for step in range(16):
            optimizer.zero_grad()
            model(batch(100 * rank + step, 8)).square().mean().backward()
            optimizer.step()
        found = [{name: value.tolist() for name, value in f.globals.items()} for f in diloco.fragments]
    count = manager.current_step()
    manager.shutdown()
    return found, count


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.5)])
def test_diloco_fragments_hold_equal_global_parameters(
    lighthouse: LighthouseProcess, delay: int, alpha: float
) -> None:
    """Two fragments in turn, with and without overlap: the global parameters agree in every bit."""
    results = run(_diloco, 2, lighthouse.address, delay, alpha)
    assert results[0] == results[1]
    assert results[0][1] == 8


def test_local_steps_and_a_quorum_beside_them_do_not_mix() -> None:
    """As in torchft DiLoCo refuses a manager that would regroup while parameters change; LocalSGD waits for each quorum."""
    manager = torchft.Manager(lighthouse_addr="127.0.0.1:1", rank=0, world_size=1)
    model = torch.nn.Linear(2, 2)
    inner, outer = (torch.optim.SGD(model.parameters()) for _ in range(2))
    with pytest.raises(ConfigurationError, match="use_async_quorum=False"):
        torchft.DiLoCo(manager, [model], inner, outer, 2)
    torchft.LocalSGD(manager, model, inner, 2)
    assert not manager.training.eager


def _hsdp(rank: int, world: int, address: str, steps: int, folder: Path) -> tuple[str, int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    replica, inner = divmod(rank, 2)
    os.environ.update(RANK=str(inner), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{replica}", rank=inner, world_size=2)
    torch.manual_seed(5 + replica)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2, lighthouse_addr=address, replica_id=f"r{replica}", timeout=30, quorum_timeout=30,
    )  # fmt: skip
    torchft.replicate(manager, model)
    managed = torchft.Optimizer(manager, optimizer)
    while manager.current_step() < steps:
        managed.zero_grad()
        model(batch(rank * 1000 + manager.current_step(), 8)).square().mean().backward()
        managed.step()
    shards = torch.cat([p.to_local().reshape(-1) for p in model.parameters()])
    result = str(shards.double().sum().item()), inner, manager.current_step()
    manager.shutdown()
    dist.destroy_process_group()
    return result


def test_sharded_replicas_average_their_shards(lighthouse: LighthouseProcess, tmp_path: Path) -> None:
    """Two replicas of two ranks (FSDP2 inside): equal shards in both, other shards inside one."""
    results = run(_hsdp, 4, lighthouse.address, 4, tmp_path)
    by_rank = {inner: {value for value, place, _ in results if place == inner} for inner in (0, 1)}
    assert len(by_rank[0]) == len(by_rank[1]) == 1
    assert by_rank[0] != by_rank[1]


def _managed(rank: int, world: int, address: str) -> list[float]:
    _, _, manager = Setup(address, f"r{rank}").make()
    group = torchft.ManagedProcessGroup(manager)
    manager.start_quorum()
    total, mean = torch.tensor([1.0 + 2 * rank]), torch.tensor([1.0 + 2 * rank])
    dist.all_reduce(total, group=group)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    found = [total.item(), mean.item(), float(group.size()), float(manager.should_commit())]
    manager.shutdown()
    return found


def test_a_managed_group_works_with_torch_distributed(lighthouse: LighthouseProcess) -> None:
    """`dist.all_reduce(group=...)` sums and averages over the replicas."""
    assert run(_managed, 2, lighthouse.address) == [[4.0, 2.0, 2.0, 1.0]] * 2


def _spare(rank: int, world: int, address: str) -> tuple[float, int, bool]:
    options = {"world_size_mode": torchft.WorldSizeMode.FIXED_WITH_SPARES}
    _, _, manager = Setup(address, f"r{rank}", options).make()
    manager.start_quorum()
    value = torch.tensor([float(10**rank)])
    manager.allreduce(value).wait()
    result = value.item(), manager.num_participants(), manager.is_participating()
    assert manager.should_commit()
    manager.shutdown()
    return result


def test_spares_stand_by_with_zeros() -> None:
    """Three members, two count: the mean is over those two and everybody gets it."""
    with LighthouseProcess(Options(min_replicas=3)) as lighthouse:
        assert run(_spare, 3, lighthouse.address) == [(5.5, 2, True), (5.5, 2, True), (5.5, 2, False)]


def _spare_of_others(rank: int, world: int, address: str) -> list[float]:
    options = {"world_size_mode": torchft.WorldSizeMode.FIXED_WITH_SPARES}
    _, _, manager = Setup(address, f"r{rank}", options).make()
    manager.start_quorum()
    found = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for sign, dtype in ((1, torch.int64), (-1, torch.float32)):
            value = torch.tensor([sign * 2 + rank * sign], dtype=dtype)
            manager.allreduce(value, reduce_op=op).wait()
            found.append(value.item())
    assert manager.should_commit()
    manager.shutdown()
    return found


def test_a_spare_changes_no_smallest_largest_or_product() -> None:
    """What it gives counts for nothing in every reduction; so does what one gives that heals beside the step."""
    with LighthouseProcess(Options(min_replicas=3)) as lighthouse:
        assert run(_spare_of_others, 3, lighthouse.address) == [[2, -3, 3, -2, 6, 6]] * 3


def test_the_sampler_gives_every_rank_of_every_replica_its_own_part() -> None:
    """Two replicas of two ranks share 8 samples without overlap."""
    parts = [
        list(torchft.DistributedSampler(list(range(8)), replica, 2, rank, 2, shuffle=False))
        for replica in (0, 1)
        for rank in (0, 1)
    ]
    assert sorted(sample for part in parts for sample in part) == list(range(8))


def test_a_manager_without_a_lighthouse_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to start and which variable to set."""
    monkeypatch.delenv("ALLRANKS_LIGHTHOUSE", raising=False)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        torchft.Manager(rank=0, world_size=1)
    assert "ALLRANKS_LIGHTHOUSE" in caught.value.hint


def test_the_address_for_others_is_on_the_way_to_the_lighthouse() -> None:
    """Loopback for a lighthouse on this machine; what the user says always wins."""
    options = {"rank": 0, "world_size": 1}
    assert torchft.Manager(lighthouse_addr="127.0.0.1:1", **options).options.host == "127.0.0.1"
    assert (
        torchft.Manager(lighthouse_addr="http://127.0.0.1:1", hostname="10.0.0.9", **options).options.host
        == "10.0.0.9"
    )


def test_options_come_from_the_argument_then_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One precedence for all of them; torchft's variables count too."""
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://10.0.0.1:29510")
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "7")
    monkeypatch.setenv("TORCHFT_PROACTIVE_RECOVERY", "0")
    monkeypatch.delenv("ALLRANKS_LIGHTHOUSE", raising=False)
    manager = torchft.Manager(rank=0, world_size=1, quorum_timeout=3, hostname="127.0.0.1")
    found = manager.options
    assert (found.lighthouse, found.timeout_s, found.quorum_timeout_s, found.connect_timeout_s, found.proactive) == (
        "10.0.0.1:29510", 7.0, 3.0, 60.0, False,
    )  # fmt: skip


def test_a_setting_that_a_manager_does_not_know_is_named() -> None:
    """With those that it knows; torchft's arguments without a meaning are torchft's alone."""
    from allranks.manager.manager import Manager

    with pytest.raises(TypeError, match="quorum_retries"):
        Manager(lighthouse_addr="127.0.0.1:1", quorum_retries=1)
    torchft.Manager(lighthouse_addr="127.0.0.1:1", rank=0, world_size=1, quorum_retries=1)


def test_the_default_group_has_the_timeout_of_its_manager() -> None:
    """One number for one wait: not the group's own default."""
    manager = torchft.Manager(lighthouse_addr="127.0.0.1:1", rank=0, world_size=1, timeout=7)
    assert manager.group.timeout_s == 7.0


LIKE_TORCHFT = """
from allranks.torchft.coordination import LighthouseServer
from allranks.torchft.manager import Manager
from allranks.torchft.process_group import ProcessGroupGloo

server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
manager = Manager(ProcessGroupGloo(), None, None, 1, lighthouse_addr=server.address(), rank=0, world_size=1)
manager.start_quorum()
print(manager.should_commit())
manager.shutdown()
server.shutdown()
"""


@pytest.mark.usefixtures("forks")
def test_torchft_imports_work_with_one_word_changed() -> None:
    """Its modules are there (names: tests/torchft). A program of its own: gRPC does not outlive a fork of this process."""
    words = [sys.executable, "-c", LIKE_TORCHFT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize(("given", "device"), [("cuda:1", "cuda:1"), (1, "cuda:1"), (None, None)])
def test_the_device_of_an_nccl_group_may_be_given_as_people_write_it(given: Any, device: str | None) -> None:
    """A string, a number or nothing; torch's own constructor takes a torch.device only."""
    from allranks.manager.groups.nccl import ProcessGroupNCCL

    made = ProcessGroupNCCL(30, device=given).device
    assert made == (None if device is None else torch.device(device))
