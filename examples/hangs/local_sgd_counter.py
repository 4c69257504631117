"""Local SGD: rank 1 counts its steps from another start and averages the model one step earlier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

step = 1 if rank == 1 else 0
for _ in range(14):
    dist.all_gather([torch.ones(1) for _ in range(world)], torch.ones(1))  # <- here
    step += 1
    if step % 5 == 0:
        dist.all_reduce(torch.ones(64))  # <- here
