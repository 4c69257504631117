"""Rank 0 calls all_reduce where the others reduce to it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    loss = torch.ones(4)
    if rank == 0 and step == 5:
        dist.all_reduce(loss)  # <- here
    else:
        dist.reduce(loss, 0)  # <- here
    dist.all_reduce(torch.ones(16))  # <- here
