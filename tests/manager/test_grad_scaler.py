"""A GradScaler over replicas: a step whose gradients overflow is voted on, too, so all have the same scale after it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from allranks import Manager
from allranks.drill.ranks import Ranks
from allranks.lighthouse.options import Options
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.optimizer import Optimizer

from .cluster import LIMIT_S, LighthouseProcess, batch, fingerprint

STEPS, BAD = 6, 3
Course = tuple[str, float, int, int]  # state, scale, tries, groups


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    with LighthouseProcess(Options(min_replicas=2)) as running:
        yield running


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), scaler


def _train(rank: int, world: int, address: str, clip: bool, given_up: bool) -> Course:
    """In step BAD rank 0's loss is infinite; `given_up`: only in its first try, in which rank 1 fails and sees no overflow."""
    model, inner, scaler = build()
    manager = Manager(
        state=[model, inner, scaler], min_replica_size=2, replica_id=f"r{rank}", rank=0, world_size=1,
        lighthouse_addr=address, timeout=30, quorum_timeout=30,
    )  # fmt: skip
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    tries: list[int] = []
    while manager.current_step() < STEPS and len(tries) < 3 * STEPS:
        optimizer.zero_grad()
        step = manager.current_step()
        bad = step == BAD and not (given_up and BAD in tries)
        loss = ddp(batch(step, 8)).square().mean()
        scaler.scale(loss * (math.inf if bad and rank == 0 else 1.0)).backward()
        if bad and given_up and rank == 1:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            manager.report_error(RuntimeError("the test says so"))
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        tries.append(step)
    assert manager.training.generation is not None
    groups = manager.training.generation.quorum.number
    manager.shutdown()
    return fingerprint(model, inner), scaler.get_scale(), len(tries), groups


def _alone(rank: int, world: int, clip: bool, given_up: bool) -> Course:
    model, inner, scaler = build()
    for step in range(STEPS):
        inner.zero_grad()
        loss = model(batch(step, 8)).square().mean()
        scaler.scale(loss * (math.inf if step == BAD and not given_up else 1.0)).backward()
        if clip:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(inner)
        scaler.update()
    return fingerprint(model, inner), scaler.get_scale(), STEPS + given_up, 1


@pytest.mark.parametrize("clip", [False, True], ids=["as it is", "clipped"])
@pytest.mark.parametrize("given_up", [False, True], ids=["committed", "given up"])
def test_an_overflow_in_one_replica_is_that_of_all(
    lighthouse: LighthouseProcess, clip: bool, given_up: bool
) -> None:
    """As in a training alone the batch is passed over; a step that is given up changes no scale and is tried again."""
    with Ranks(_train, 2, args=(lighthouse.address, clip, given_up), backend=None) as ranks:
        both = ranks.values(LIMIT_S)
    with Ranks(_alone, 1, args=(clip, given_up), backend=None) as ranks:
        alone = ranks.values(LIMIT_S)
    assert both == alone * 2
