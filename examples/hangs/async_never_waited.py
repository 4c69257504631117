"""Rank 0 starts an asynchronous reduction every step and never waits; rank 1 leaves one out and everything shifts."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

handles = []
for step in range(12):
    if not (rank == 1 and step == 6):
        handles.append(dist.all_reduce(torch.ones(32), async_op=True))  # <- here
    dist.all_reduce(torch.ones(16))
