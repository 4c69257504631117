"""A healthy training job that is anything but even, for `benchmarks/healthy.py`: pauses, evaluations, compiles, checkpoints.

    _healthy_job.py OUT SECONDS SEED

With marks or without (by the seed); all ranks draw the same surprises from the seed.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import allranks

OUT, SECONDS, SEED = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
RANK = int(os.environ.get("ALLRANKS_RANK") or os.environ["RANK"])
REPLICAS = "REPLICA_GROUP_ID" in os.environ
PAUSE_S = (4.0, 20.0)


def surprise(dice: random.Random, step: int, model: nn.Module, batch: torch.Tensor) -> str:
    """What happens beside the step this time; the same on all ranks, but for who does it."""
    kind = dice.choice(["none"] * 60 + ["pause", "one pauses", "eval", "compile", "save", "collect", "data"])
    length, who = dice.uniform(*PAUSE_S), dice.randrange(3)
    if kind == "pause":  # all ranks: a new shard, a slow file system
        time.sleep(length)
    elif kind == "one pauses" and who == RANK:  # a straggler, well below what is looked at by default
        time.sleep(min(length, 8.0))
    elif kind == "eval":
        with torch.no_grad():
            end = time.monotonic() + length
            while time.monotonic() < end:
                model(batch)
    elif kind == "compile":
        with torch.no_grad():
            fresh = nn.Sequential(*(nn.Linear(16, 16) for _ in range(1 + step % 5)))
            torch.compile(fresh)(torch.randn(2, 16))
    elif kind == "save":
        torch.save(model.state_dict(), OUT / f"save.{RANK}")
        os.sync()
    elif kind == "collect":
        junk = [[] for _ in range(500_000)]
        del junk
        gc.collect()
    elif kind == "data" and who == RANK:
        torch.randn(2000, 2000) @ torch.randn(2000, 2000)
    return kind


def main() -> None:
    """Trains for about SECONDS."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    batch = torch.randn(16, 256)
    dice = random.Random(SEED)
    steps = 0
    end = time.time() + SECONDS
    if REPLICAS:
        from allranks.manager.ddp import DistributedDataParallel
        from allranks.manager.manager import Manager
        from allranks.manager.optimizer import Optimizer

        inner = torch.optim.SGD(model.parameters(), lr=1e-4)
        body = model
        manager = Manager(
            load_state_dict=lambda state: body.load_state_dict(state["model"]),
            state_dict=lambda: {"model": body.state_dict()},
            min_replica_size=3,
        )
        model, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        # all replicas end at the same step: the first one decides when, for all
        stop = OUT / "stop_at"
        while not stop.exists() or manager.current_step() < int(stop.read_text() or "0"):
            optimizer.zero_grad()
            surprise(dice, steps, body, batch)
            model(batch).square().mean().backward()
            optimizer.step()
            steps += 1
            if RANK == 0 and time.time() > end and not stop.exists():
                (OUT / "stop").write_text(str(manager.current_step() + 20))
                (OUT / "stop").replace(stop)
            time.sleep(0.05)
        manager.shutdown()
        return
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer_ = torch.optim.SGD(model.parameters(), lr=1e-4)
    more = torch.ones(1)
    while True:
        if SEED % 2:
            allranks.step(steps)
        more[0] = float(time.time() < end)
        dist.broadcast(more, 0)
        if not more.item():
            break
        optimizer_.zero_grad()
        surprise(dice, steps, model.module, batch)
        model(batch).square().mean().backward()
        optimizer_.step()
        steps += 1
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
