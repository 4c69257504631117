"""Rank 1 gathers on itself, the others on rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    target = 1 if rank == 1 and step == 8 else 0
    parts = [torch.empty(8) for _ in range(world)] if rank == target else None
    dist.gather(torch.ones(8), parts, dst=target)  # <- here
    dist.barrier()
