"""Two of four ranks see NaN and skip the step; the others wait for both."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for step in range(30):
    allranks.step(step)
    if rank in (1, 2) and step == 9:
        continue
    dist.all_reduce(torch.ones(16))  # <- here
    if step % 10 == 9:
        dist.barrier()
