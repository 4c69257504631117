"""Rank 1 is busy with something else and never comes to the next all_reduce."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

loss = torch.ones(8)
for step in range(100):
    if rank == 1 and step == 6:
        time.sleep(3600)
    dist.all_reduce(loss)  # <- here
