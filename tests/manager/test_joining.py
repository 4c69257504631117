"""A replica that comes to running ones: it heals beside its first step, gives nothing in it and costs them nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.drill.self_faults import around
from allranks.errors import HealingFailed
from allranks.lighthouse.options import Options
from allranks.manager.groups.generation import Generation, StepAttempt
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.held import HeldState
from allranks.manager.plan import Claim, ReplicaClaim, decide
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh
from allranks.model.cluster import Member, Quorum

from .cluster import LIMIT_S, Cluster, Job, LighthouseProcess, batch, fingerprint

ALONE, TOGETHER = 3, 3  # steps that are made


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


class Net(nn.Module):
    """Answers with a dict, and counts its forwards in a buffer too large to be taken for a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(40_000))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.seen.add_(1)
        return {"out": self.last(self.first(x).tanh()), "rows": len(x)}


@dataclass
class Course:
    """What one replica saw, step by step."""

    steps: list[tuple[int, int, bool]] = field(default_factory=list)  # step, participants, whether it counted
    backwards: list[int] = field(default_factory=list)  # that reached the first layer, in each step
    state: str = ""
    seen: float = 0.0


def state_of(model: Net, inner: torch.optim.Optimizer) -> str:
    model.seen.zero_()  # buffers are each replica's own
    return fingerprint(model, inner)


def loss_of(answer: dict[str, Any]) -> torch.Tensor:
    answer["out"].mul_(2.0)  # in place, as scripts do
    loss: torch.Tensor = answer["out"].square().sum() / answer["rows"]
    return loss


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(rank: int, world: int, address: str, folder: str, how: str) -> Course:
    model, inner = build()
    scaler = {"scale": 1.0}  # as a GradScaler's: the gradients mean nothing without it
    if rank == 1:
        nn.init.constant_(model.first.weight, 3.0)  # only healing brings the others' weights
        while not Path(folder, "go").exists():
            time.sleep(0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        scaler.update(state["scaler"])
        if rank == 1:
            Path(folder, "loading").touch()

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict(), "scaler": dict(scaler)}

    manager = torchft.Manager(
        load_state_dict=load, state_dict=save, min_replica_size=1, lighthouse_addr=address,
        replica_id=f"r{rank}", rank=0, world_size=1, timeout=30, quorum_timeout=30,
        use_async_quorum=how != "heal first",
    )  # fmt: skip
    ddp = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.001)
    optimizer = torchft.Optimizer(manager, inner)
    course, reached = Course(), [0]
    model.first.weight.register_hook(lambda gradient: reached.__setitem__(0, reached[0] + 1))
    together = 0
    while together < TOGETHER:
        reached[0] = 0
        optimizer.zero_grad()
        step = manager.current_step()
        x = batch(step, 8)
        if rank == 2 and manager.num_participants() and len(manager.training.settled().quorum.members) == 3:
            while not Path(folder, "loading").exists():
                time.sleep(0.001)
            os._exit(0)
        if how == "two backwards":
            with ddp.no_sync():
                (loss_of(ddp(x)) / 2 * scaler["scale"]).backward()
            (loss_of(ddp(x)) / 2 * scaler["scale"]).backward()
        else:
            (loss_of(ddp(x)) * scaler["scale"]).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= scaler["scale"]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        count, counted = manager.num_participants(), manager.is_participating()
        if optimizer.step():
            # enough for a quorum: the state that heals is the one with which the next step begins
            time.sleep(0.01)
            # A power of two: no bit is lost. Bounded: the first one may train alone for hundreds of steps.
            scaler["scale"] = scaler["scale"] * 2 if scaler["scale"] < 2**40 else 1.0
            course.steps.append((manager.current_step() - 1, count, counted))
            assert (manager.num_participants(), manager.is_participating()) == (count, counted)
            course.backwards.append(reached[0])
            together += count == 2 and Path(folder, "loading").exists()
        if rank == 0 and manager.current_step() >= ALONE:
            Path(folder, "go").touch()
    course.seen = float(model.seen.min())
    course.state = state_of(model, inner)
    manager.shutdown()
    return course


def _alone(rank: int, world: int, steps: int) -> str:
    model, inner = build()
    for step in range(steps):
        inner.zero_grad()
        loss_of(model(batch(step, 8))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        inner.step()
    return state_of(model, inner)


def run(lighthouse: LighthouseProcess, folder: Path, how: str, size: int = 2) -> tuple[Course, Course]:
    """Both courses; their states are equal, and those of one that trained alone on the same batches."""
    with Ranks(_train, size, args=(lighthouse.address, str(folder), how), backend=None) as ranks:
        ended = ranks.join(LIMIT_S)
    assert not ended[0].error and not ended[1].error, ended
    assert all(ended[rank].value is None for rank in range(2, size)), ended  # died in that step
    there, late = ended[0].value, ended[1].value
    with Ranks(_alone, 1, args=(there.steps[-1][0] + 1,), backend=None) as ranks:
        alone = ranks.values(LIMIT_S)[0]
    assert there.state == late.state == alone
    assert [count for _, count, _ in there.steps[-TOGETHER:]] == [2] * TOGETHER
    return there, late


@pytest.mark.parametrize("how", ["one backward", "two backwards"])
def test_it_gives_nothing_in_its_first_step(lighthouse: LighthouseProcess, tmp_path: Path, how: str) -> None:
    """The others' mean is over themselves; its parameters follow because the gradients reach it too."""
    there, late = run(lighthouse, tmp_path, how)
    joined = late.steps[0][0]
    assert late.steps[0] == (joined, 1, False)
    assert (joined, 1, True) in there.steps
    each = 2 if how == "two backwards" else 1
    assert late.backwards == [each] * (TOGETHER + 1)
    assert late.seen >= ALONE  # healed, not its own count


def test_it_gives_nothing_when_its_first_step_is_repeated(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    """A member dies in that step. The newcomer has the state by then, but its gradients are of the weights before."""
    run(lighthouse, tmp_path, "one backward", size=3)


def test_without_an_asynchronous_quorum_it_heals_first_and_counts_at_once(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    """The others wait for its healing and its first step; no gradient is lost."""
    _, late = run(lighthouse, tmp_path, "heal first")
    assert late.steps[0][1:] == (2, True)
    assert late.backwards[0] == 1


def made(claim: ReplicaClaim) -> Generation:
    """A generation of two in which replica 1 is we."""
    claims = [ReplicaClaim(ranks=(Claim(term=1, step=5, seen=1),)), claim]
    members = tuple(Member(replica=f"r{place}") for place in range(2))
    group = ProcessGroupGloo()
    return Generation(Quorum(2, 1, members), decide(claims, 2), 1, 0, group, VoteMesh())


def test_gradients_of_a_state_that_had_to_be_healed_are_never_counted() -> None:
    """A group that counts on us: the step is tried again. One in which we give zeros: it continues."""
    behind = Claim(term=0, step=0)
    for beside in (True, False):
        training, attempt = TrainingState(), StepAttempt()
        training.generation = made(ReplicaClaim(ranks=(behind,), beside=beside))
        training.generation.loaded, training.attempt = False, attempt
        assert (training.bind(attempt, 1.0) is not None) is beside
        assert bool(attempt.invalid) is not beside
        assert (training.rebind(attempt, 1.0) is not None) is beside


@pytest.mark.parametrize("asked", [False, True])
def test_who_gave_zeros_gives_no_gradients_when_the_step_is_repeated(asked: bool) -> None:
    """They were computed before the state was healed, or without a share of the batch, for which the script may ask first."""
    training = TrainingState()
    training.generation = made(ReplicaClaim(ranks=(Claim(term=0, step=0),), beside=True))
    training.generation.loaded, attempt = False, training.begin()
    assert (training.bound(1.0) if asked else training.bind(attempt, 1.0)) is training.generation
    training.generation = made(ReplicaClaim(ranks=(Claim(term=1, step=5, seen=1),)))
    assert training.generation.participates and training.generation.loaded
    assert (training.bind if asked else training.rebind)(attempt, 1.0) is None and attempt.invalid
    assert training.bind(training.begin(), 1.0) is training.generation


def test_who_came_late_counts_from_the_second_step_on() -> None:
    """The group's first commit is what makes them equal; one that fails does not."""
    training = TrainingState()
    generation = training.generation = made(ReplicaClaim(ranks=(Claim(),), beside=True))
    for committed, participants in ((False, (0,)), (True, (0,)), (False, (0, 1)), (True, (0, 1))):
        attempt = training.begin()
        assert training.bind(attempt, 1.0) is generation
        assert generation.participants == participants
        if committed:
            assert training.passed(generation, 1.0)
        assert generation.participants == participants  # also for who asks after the step
        training.end_step()


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_step_that_was_refused_is_in_doubt_only_for_who_asked_before(asked_before: bool) -> None:
    """States differ: who knows that says so in its claim, or one that lost the group before it knew could commit the step
    alone. A quorum that was asked before decides for both."""
    training = TrainingState(held=HeldState(step=6))
    generation = training.generation = made(ReplicaClaim(ranks=(Claim(),), beside=True))
    attempt = training.begin()
    assert training.bind(attempt, 1.0) is generation
    assert training.begin_vote(attempt) is generation
    if asked_before:
        assert training.claim(broken=True).pending
    training.refuse()
    training.break_group(generation, "r1 must take the state of the others")
    assert not generation.usable
    assert bool(training.claim(broken=True).pending) is asked_before
    if asked_before:
        after = made(ReplicaClaim(ranks=(Claim(),)))
        after.plan = replace(after.plan, healing=(), rolls_forward=frozenset({(1, 0)}))
        training.publish(after)
    assert training.committed_by_quorum(1.0) is asked_before
    assert training.step == (7 if asked_before else 6)


def test_a_verdict_that_is_there_before_the_vote_is_known_to_be_in_doubt_is_heeded() -> None:
    """The quorum counts the step: a member that did not apply it would train on with an update missing."""
    training = TrainingState(held=HeldState(step=6))
    generation = training.generation = made(ReplicaClaim(ranks=(Claim(),), beside=True))
    attempt = training.begin()
    assert training.bind(attempt, 1.0) is generation
    assert training.begin_vote(attempt) is generation
    assert training.claim(broken=True).pending
    after = made(ReplicaClaim(ranks=(Claim(),)))
    after.plan = replace(after.plan, healing=(), rolls_forward=frozenset({(1, 0)}))
    training.publish(after)
    assert training.resolve_lost_vote(generation, "r1 is gone", 1.0)
    assert training.step == 7


def train_locally(rank: int, world: int, address: str, folder: str) -> float:
    """LocalSGD whose local steps change nothing: the mean is the weights of rank 0, unless others count unhealed."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 + 99.0 * rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    manager = torchft.Manager(
        min_replica_size=1, lighthouse_addr=address, replica_id=f"r{rank}", rank=0, world_size=1, timeout=30,
        quorum_timeout=30,
    )  # fmt: skip
    local = torchft.local_sgd.LocalSGD(manager, model, inner, sync_every=1)

    def group_comes() -> None:
        with manager.training.parking():
            while manager.training.settled() is None:
                time.sleep(0.005)

    if rank == 1:
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        around(manager.start()._open().regrouper.rendezvous, "agree_on_group", before=group_comes)
    together = 0
    with local:
        while together < TOGETHER:
            before = manager.current_step()
            model(torch.ones(1, 4)).sum().backward()
            inner.step()
            together += manager.current_step() > before and manager.num_participants() == 2
            if manager.current_step() >= ALONE:
                Path(folder, "go").touch()
    manager.shutdown()
    return float(model.weight[0, 0])


def test_a_group_that_comes_while_a_step_is_opened_waits_for_the_state_too(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    """LocalSGD and sharded models heal before the step: never after their weights were given to the others."""
    with Ranks(train_locally, 2, args=(lighthouse.address, str(tmp_path)), backend=None) as ranks:
        assert ranks.values(LIMIT_S) == [1.0, 1.0]


class OverNccl(ProcessGroupGloo):
    """Says that it is NCCL's."""

    backend_name = "nccl"


def test_a_newcomer_over_another_backend_is_refused_and_the_running_one_goes_on(
    lighthouse: LighthouseProcess,
) -> None:
    """One of the hosts has lost its GPU, and the script chose gloo there: that replica says so and ends."""
    with Cluster(lighthouse, Job(until_told=True, pause_s=0.01)) as cluster:
        cluster.start("runs")
        cluster.wait_for_progress("runs", 2)
        cluster.start("other", job=replace(cluster.job, options={"pg": OverNccl()}))
        ended = cluster.end("other")
        assert ended.exit_code != 0
        assert "other communicates over nccl and runs over gloo" in str(ended.error)
        cluster.wait_for_progress("runs", cluster.progress("runs") + 3)
        cluster.tell_to_stop()
        assert set(cluster.results()) == {"runs"}


def train_sharded(rank: int, world: int, address: str, folder: str) -> bool:
    """A step of an FSDP2 model, in whose forward another thread asks for the state."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    adam = torch.optim.AdamW(model.parameters())
    manager = torchft.Manager(
        state=[model, adam], rank=0, world_size=1, lighthouse_addr=address, replica_id="sharded", timeout=1.0,
        quorum_timeout=LIMIT_S, connect_timeout=LIMIT_S,
    )  # fmt: skip

    def read() -> None:
        with contextlib.suppress(HealingFailed):  # the training thread does not wait now
            manager._read_state()

    def read_beside(*_: object) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(LIMIT_S)

    model[0].register_forward_pre_hook(read_beside)
    optimizer = torchft.Optimizer(manager, adam)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    committed = optimizer.step()
    manager.shutdown()
    return bool(committed)


def test_the_state_of_a_sharded_model_is_not_read_inside_its_forward(
    lighthouse: LighthouseProcess, tmp_path: Path
) -> None:
    """FSDP2's state_dict() takes the gathered parameters away: the forward beside it failed, or the process crashed."""
    with Ranks(train_sharded, 1, args=(lighthouse.address, str(tmp_path)), backend=None) as ranks:
        ended = ranks.join(LIMIT_S)[0]
    assert ended.exit_code == 0 and ended.value is True, ended.error
