"""Rank 2 expects a larger part of what rank 0 scatters."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    parts = [torch.ones(8) for _ in range(world)] if rank == 0 else None
    dist.scatter(torch.empty(16 if rank == 2 and step == 8 else 8), parts, src=0)  # <- here
    dist.barrier()
