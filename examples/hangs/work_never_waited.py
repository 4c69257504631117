"""Rank 1 issues a broadcast asynchronously that nobody else makes, and continues."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

works = []
for step in range(10):
    if rank == 1 and step == 6:
        works.append(dist.broadcast(torch.ones(4), 1, async_op=True))  # <- here
    dist.all_reduce(torch.ones(16))  # <- here
