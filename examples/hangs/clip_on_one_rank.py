"""FSDP2: rank 1 clips its gradients at a step where the others do not; the norm of a sharded gradient is a collective."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = fully_shard(torch.nn.Linear(16, 16))
for step in range(20):
    model(torch.ones(2, 16)).sum().backward()
    if step % 4 == 3 or (rank == 1 and step == 9):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
        norm.full_tensor()
