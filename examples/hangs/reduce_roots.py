"""Rank 2 sends its metrics to another rank than the others."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    target = 1 if rank == 2 and step == 8 else 0
    dist.reduce(torch.ones(8), target)  # <- here
    dist.barrier()
