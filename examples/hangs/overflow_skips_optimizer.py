"""ZeRO: rank 1 finds an overflow, which it does not tell the others, and skips the optimizer step with its all_gather."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for step in range(12):
    allranks.step(step)
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(12))
    overflow = rank == 1 and step == 7
    if not overflow:
        dist.all_gather_into_tensor(torch.empty(12), torch.ones(4))  # <- here
