"""All ranks vote whether anybody has data left; rank 2 has none and leaves without asking the others."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

batches = [8, 8, 5][rank]
for step in range(10):
    if rank == 2 and step >= batches:
        break
    left = torch.tensor([float(step < batches)])
    dist.all_reduce(left)  # <- here
    if not left.item():
        break
    dist.all_reduce(torch.ones(16))  # <- here

time.sleep(3600)
