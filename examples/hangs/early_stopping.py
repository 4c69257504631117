"""Each rank decides by its own validation loss when to stop: rank 2 stops first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for epoch in range(20):
    for _ in range(3):
        dist.all_reduce(torch.ones(16))  # <- here
    dist.all_gather([torch.empty(1) for _ in range(world)], torch.ones(1))
    if rank == 2 and epoch == 3:
        break
dist.barrier()  # <- here
