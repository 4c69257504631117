"""Rank 1 fails in a step; a barrier in a finally block keeps it waiting for the others, who are still training."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

try:
    for step in range(12):
        if rank == 1 and step == 7:
            raise ValueError("bad sample")
        dist.all_reduce(torch.ones(16))  # <- here
finally:
    dist.barrier()  # <- here
