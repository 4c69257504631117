"""Data parallel training that survives: kill a replica, watch the others go on, and it come back.

    python examples/train_ddp.py                      # starts two replicas of itself on this machine
    allranks run --replicas 4 examples/train_ddp.py   # or as many as you like

The lines with a manager in them are all that fault tolerance asks for.
"""

from __future__ import annotations

import os
import sys
import zlib

import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", "300"))


def main() -> None:
    from allranks import DistributedDataParallel, Manager, Optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    manager = Manager(state=[model, inner], min_replica_size=1)
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    truth = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))

    while manager.current_step() < STEPS:
        step = manager.current_step()
        noise = torch.Generator().manual_seed(zlib.crc32(f"{manager.replica_id()}/{step}".encode()))
        x = torch.randn(64, 32, generator=noise)
        optimizer.zero_grad()  # opens the step
        loss = nn.functional.cross_entropy(ddp(x), (x @ truth).argmax(1))
        loss.backward()  # gradients are averaged over those who are there
        optimizer.step()  # a vote closes it: all apply it, or none
        if manager.current_step() % 20 == 0:
            print(
                f"step {manager.current_step()} loss {loss.item():.4f} replicas {manager.num_participants()}",
                flush=True,
            )
    manager.shutdown()


if __name__ == "__main__":
    if not any(os.environ.get(name) for name in ("ALLRANKS_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")):
        command = [sys.executable, "-m", "allranks", "run", "--replicas", "2", __file__]
        os.execv(sys.executable, command)
    main()
