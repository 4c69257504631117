"""A ring exchange: rank 2 passes its block to the left where the others pass to the right."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(6):
    for turn in range(2):
        right, left = (rank + 1) % world, (rank - 1) % world
        if rank == 2 and step == 4 and turn == 1:
            right, left = left, right
        work = dist.isend(torch.ones(8), right)  # <- here
        dist.recv(torch.ones(8), left)  # <- here
        work.wait()  # <- here
    dist.all_reduce(torch.ones(16))  # <- here
