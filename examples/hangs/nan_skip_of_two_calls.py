"""Rank 1 skips a step of two calls: norm and gradients."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(40):
    allranks.step(step)
    if rank == 1 and step == 9:
        continue
    dist.all_reduce(torch.ones(1))  # <- here
    dist.all_reduce(torch.ones(16))
    if step % 20 == 19:
        dist.all_gather([torch.empty(4) for _ in range(world)], torch.ones(4))
