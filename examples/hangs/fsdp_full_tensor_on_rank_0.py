"""FSDP2: only rank 0 gathers a parameter to log its norm."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
for step in range(20):
    model(torch.ones(2, 16)).sum().backward()
    if rank == 0 and step == 5:
        print(next(model.parameters()).full_tensor().norm())  # <- here
