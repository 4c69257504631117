"""A collective that waits for a state transfer never keeps it waiting; a stand-in plays the GPU's context lock."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks.torchft as torchft
from allranks.drill.ranks import Ranks
from allranks.lighthouse.options import Options
from allranks.manager.groups.generation import Generation, StepAttempt
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.heal.fetch import Fetch
from allranks.manager.heal.state import Landing, Offer
from allranks.manager.plan import MAX_SOURCES, Claim, ReplicaClaim, decide
from allranks.manager.training import TrainingState
from allranks.manager.vote_mesh import VoteMesh
from allranks.model.cluster import Member, Quorum

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=1, heartbeat_timeout_s=2.0)) as running:
        yield running


class Device(ProcessGroupGloo):
    """Plays a GPU on which every kernel is used for the first time: loading one waits for the device.

    While it waits it holds the lock that every copy from or to the device needs too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.context = threading.Lock()
        self.order: list[str] = []

    def allreduce_in(self, number: int, tensors: list[torch.Tensor], options: Any) -> Any:
        work = super().allreduce_in(number, tensors, options)  # refused where the members have changed
        if self.size() > 1:
            self.order.append("L")
        with self.context:
            while not work.is_completed():
                time.sleep(0.001)
        return work

    def copied(self, real: Any) -> Any:
        """A copy of the healing channel, as the device would make it."""

        def copy(*args: Any) -> Any:
            with self.context:
                self.order.append("c")
                return real(*args)

        return copy


def after(path: Path, real: Any) -> Any:
    """The joiner takes nothing before the source stands where it would launch its first collective."""

    def wait(*args: Any) -> Any:
        while not path.exists():
            time.sleep(0.01)
        return real(*args)

    return wait


def _train(rank: int, world: int, address: str, folder: str, how: str) -> tuple[str, str]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # only healing makes them equal
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    device = Device()
    Offer.read = device.copied(Offer.read)  # type: ignore[method-assign]
    Landing.settle = device.copied(Landing.settle)  # type: ignore[method-assign]
    at_launch = Path(folder, "at the launch")
    Fetch._take_stripes = after(at_launch, Fetch._take_stripes)  # type: ignore[method-assign]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        device, load, lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2 if how == "start" else 1, lighthouse_addr=address, replica_id=f"r{rank}", rank=0,
        world_size=1, timeout=5, quorum_timeout=10, use_async_quorum=how != "heal first",
    )  # fmt: skip
    ddp = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=0.0005)
    optimizer = torchft.Optimizer(manager, inner)
    while rank and how != "start" and not Path(folder, "go").exists():
        time.sleep(0.01)
    real, together, launched = manager._allreduce, 0, []

    def launch(*args: Any, **named: Any) -> Any:
        if not rank and device.size() > 1:
            launched.append("one")
            if how != "beside the step" or len(launched) > len(ddp._buckets):
                at_launch.touch()
        return real(*args, **named)

    manager._allreduce = launch  # type: ignore[method-assign]
    while together < 2:
        optimizer.zero_grad()
        if not rank and manager.current_step() == 2:
            Path(folder, "go").touch()
        ddp(batch(manager.current_step(), 8)).square().mean().backward()
        manager.allreduce(torch.ones(1)).wait()  # a script's own, after the backward
        both = manager.num_participants() == 2
        together += optimizer.step() and both
        time.sleep(0.005)
    manager.shutdown()
    return fingerprint(model, inner), "".join(device.order)


@pytest.mark.parametrize("how", ["start", "heal first", "beside the step"])
def test_a_source_that_blocks_in_its_first_backward_does_not_keep_a_joiner_from_its_state(
    lighthouse: LighthouseProcess, tmp_path: Path, how: str
) -> None:
    """At either end the last copy of the state comes before the first collective that waits for the joiner.

    One that heals beside the step gives zeros at once: the collectives of that backward do not wait for its state.
    """
    if how == "start":
        lighthouse.kill()
        lighthouse = LighthouseProcess(Options(min_replicas=2, heartbeat_timeout_s=2.0)).start()
    with (
        lighthouse,
        Ranks(_train, 2, args=(lighthouse.address, str(tmp_path), how), backend=None) as ranks,
    ):
        (source, sent), (joiner, received) = ranks.values(LIMIT_S)
    assert source == joiner
    first = "LLLL" if how == "beside the step" else ""
    for order in (sent, received):
        assert re.fullmatch(f"({first}c+)+L+", order)  # once more where the group broke


def generation(index: int, sources: int, healing: int, late: int = 0) -> Generation:
    """One in which we are replica `index`; `sources` hold the state, the others heal, the first `late` beside the step."""
    claims = [ReplicaClaim(ranks=(Claim(term=1, step=5, seen=1),))] * sources
    claims += [ReplicaClaim(ranks=(Claim(),), beside=place < late) for place in range(healing)]
    members = tuple(Member(replica=f"r{place}") for place in range(sources + healing))
    group = ProcessGroupGloo()
    return Generation(Quorum(2, 1, members), decide(claims, 2), index, 0, group, VoteMesh())


def test_only_those_whom_a_transfer_needs_hold_their_collectives_back() -> None:
    """Its receiver and the members that it takes from; each for the transfers that it is part of."""
    first, last = generation(0, 6, 2), generation(7, 6, 2)
    assert first.transfers == {6}
    assert last.transfers == {7}
    assert [generation(place, 6, 2).transfers for place in range(1, 6)] == [{6, 7}] * 3 + [{7}, set()]
    assert len(first.plan.sources_of(6)) == MAX_SOURCES
    assert generation(0, 2, 0).transfers == set()


def test_collectives_go_on_when_the_last_transfer_has_ended() -> None:
    """Also when its end was reported before our own group was there."""
    training = TrainingState()
    training.transferred((1, 2), 1)
    training.publish(made := generation(0, 1, 2))
    attempt = training.begin()
    assert made.transfers == {2} and not training.may_launch(attempt)
    thread = threading.Thread(target=training.transferred, args=((1, 2), 2))
    thread.start()
    assert training.wait_for_transfers(attempt, made, 20.0) == ""
    thread.join()
    assert training.may_launch(attempt)


def test_who_heals_beside_the_step_holds_nothing_back_before_the_first_backward_has_ended() -> None:
    """It gives zeros without a state until then; for everything after it the others count on its state."""
    attempt, both = StepAttempt(), generation(0, 1, 2, late=1)
    assert both.plan.late == (1,)
    assert both.holding(attempt) == {2}
    attempt.reduced = True
    assert both.holding(attempt) == {1, 2}


def test_a_transfer_that_does_not_end_is_waited_for_with_a_limit() -> None:
    training = TrainingState()
    training.publish(made := generation(0, 1, 1))
    assert "r1 did not fetch its state in 0.0 s" in training.wait_for_transfers(StepAttempt(), made, 0.01)


def test_a_group_that_breaks_ends_the_wait() -> None:
    """The launch then fails, and the step continues in the next group."""
    training = TrainingState()
    training.publish(made := generation(0, 1, 1))
    thread = threading.Thread(target=training.break_group, args=(made, "a member died"))
    thread.start()
    assert training.wait_for_transfers(StepAttempt(), made, 20.0) == ""
    thread.join()
    assert not made.usable
