"""Rank 1 trains one epoch less and comes to the final evaluation while the others still train."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for epoch in range(2 if rank == 1 else 3):
    for batch in range(5):
        allranks.step(epoch * 5 + batch)
        dist.all_reduce(torch.ones(16))  # <- here
    dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))
dist.all_gather([torch.empty(4) for _ in range(world)], torch.ones(4))  # <- here
