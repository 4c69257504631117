"""Every rank synchronises when its own counter says so: rank 1 does it twice as often."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    allranks.step(step)
    for micro in range(4):
        gradient = torch.ones(16)
        if micro == 3 or (rank == 1 and micro == 1 and step == 7):
            dist.all_reduce(gradient)  # <- here
    dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))
