"""Rank 2 resamples until a condition holds that never does."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    while rank == 2 and step == 8:
        pass
    dist.all_reduce(torch.ones(8))  # <- here
