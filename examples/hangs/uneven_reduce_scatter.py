"""Sequence parallel: rank 1 pads its sequence to another length before reduce_scatter."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    length = 9 if rank == 1 and step == 6 else 6
    parts = list(torch.ones(length, 4).chunk(world))
    dist.reduce_scatter(torch.empty_like(parts[0]), parts)  # <- here
