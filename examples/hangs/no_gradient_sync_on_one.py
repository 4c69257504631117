"""FSDP2 with gradient accumulation: in one step rank 2 does not synchronise its gradients."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = torch.nn.Sequential(*[torch.nn.Linear(12, 12) for _ in range(2)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
for step in range(16):
    last = step % 4 == 3 and not (rank == 2 and step == 11)
    model.set_requires_gradient_sync(last)
    model(torch.ones(2, 12)).sum().backward()  # <- here
