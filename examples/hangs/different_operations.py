"""Rank 2 broadcasts where the others gather."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    if rank == 2 and step == 8:
        dist.broadcast(torch.ones(8), 0)  # <- here
    else:
        dist.all_gather([torch.empty(8) for _ in range(world)], torch.ones(8))
