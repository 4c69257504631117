"""Rank 2 skips a broadcast, which does not keep the others from going on."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if not (rank == 2 and step == 7):
        dist.broadcast(torch.ones(16), 0)  # <- here
    dist.all_reduce(torch.ones(16))
