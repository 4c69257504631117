"""Trains in replica mode and writes down what it does: a line before every attempt and one after every commit.

python train_replicas.py FOLDER      (started by `allranks run --replicas`; ends when FOLDER/stop exists)

A file FOLDER/hang-PID makes this process wait in its own code for as long as the file is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tests.soak.checks import BATCH

from allranks import DistributedDataParallel, Manager, Optimizer

PACE_S = 0.05


def digest(model: torch.nn.Module) -> str:
    """Of every bit of the parameters."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main(folder: Path) -> None:
    """Until told to stop."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    name = manager.replica_id().rpartition(":")[0] or manager.replica_id()
    out = open(folder / f"replica-{os.getpid()}.jsonl", "ab", buffering=0)  # noqa: SIM115

    def note(**row: object) -> None:
        out.write(
            json.dumps({"at": time.time(), "pid": os.getpid(), "replica": name, **row}).encode() + b"\n"
        )

    note(kind="start")
    while True:
        optimizer.zero_grad()
        manager.wait_quorum()
        step, place, size = manager.current_step(), manager.participating_rank(), manager.num_participants()
        quorum = manager.quorum_id()
        note(kind="try", step=step, quorum=quorum, place=place, size=size)
        mine = range(place, BATCH, size) if place is not None else range(0)
        seeds = [torch.Generator().manual_seed(step * BATCH + i) for i in mine] or [torch.Generator()]
        x = torch.stack([torch.randn(16, generator=seed) for seed in seeds])
        loss = ddp(x).square().mean()
        time.sleep(PACE_S)
        while (folder / f"hang-{os.getpid()}").exists():
            time.sleep(0.05)
        loss.backward()
        told = torch.tensor([float((folder / "stop").exists())])
        manager.allreduce(told, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        if optimizer.step():
            after = manager.current_step()
            own = place if after == step + 1 else None  # else it was cut off and took the others' state
            group = manager.training.attempt.generation  # in which the gradients were summed
            summed = (
                (group.number, manager.participating_rank(), manager.num_participants()) if group else None
            )
            note(
                kind="commit",
                step=after,
                quorum=quorum,
                size=size,
                place=own,
                summed=summed,
                hash=digest(model),
            )
            if told.item():
                break
    note(kind="end")
    manager.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
