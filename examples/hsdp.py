"""Hybrid sharding that survives: FSDP2 shards the model inside a replica, the manager replicates it.

python examples/hsdp.py              # two replicas of two ranks each, on the CPU
"""

from __future__ import annotations

import os
import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ.get("STEPS", "60"))


def main() -> None:
    from allranks.torchft import Manager, Optimizer, replicate

    dist.init_process_group("gloo")  # the ranks of this replica only
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    manager = Manager(state=[model, inner], min_replica_size=1)
    replicate(manager, model)  # each shard is averaged with the same shard of the other replicas
    optimizer = Optimizer(manager, inner)
    truth = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(zlib.crc32(f"{manager.replica_id()}/{dist.get_rank()}".encode()))  # data of its own

    while manager.current_step() < STEPS:
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
        loss.backward()
        optimizer.step()  # all ranks of all replicas vote together
        if dist.get_rank() == 0 and manager.current_step() % 10 == 0:
            print(
                f"step {manager.current_step()} loss {loss.item():.4f} replicas {manager.num_participants()}",
                flush=True,
            )
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not any(os.environ.get(name) for name in ("ALLRANKS_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")):
        run = ["-m", "allranks", "run", "--replicas", "2", "--nproc-per-replica", "2", __file__]
        os.execv(sys.executable, [sys.executable, *run])
    main()
