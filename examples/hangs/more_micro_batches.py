"""Two ranks, gradient accumulation: in one step rank 0 reduces after every second micro-batch instead of every fourth."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    allranks.step(step)
    every = 2 if rank == 0 and step == 4 else 4
    for index in range(1, 5):
        if index % every == 0:
            dist.all_reduce(torch.ones(16))  # <- here
dist.barrier()
