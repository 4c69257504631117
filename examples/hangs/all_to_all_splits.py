"""MoE: rank 1 gives rank 2 one token more than rank 2 expects."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    gives, takes = [2] * world, [2] * world
    gives[2] += rank == 1 and step == 8
    out = torch.empty(sum(takes))
    dist.all_to_all_single(out, torch.ones(sum(gives)), takes, gives)  # <- here
