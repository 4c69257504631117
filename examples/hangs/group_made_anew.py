"""Rank 1 catches an error, destroys its group and calls init_process_group again; the others do not."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank == 1 and step == 7:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(16))  # <- here
