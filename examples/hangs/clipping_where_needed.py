"""Ranks whose gradients are large clip them, with an all_reduce of the norm: in one step ranks 0 and 2 do."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    gradient = torch.ones(16)
    if step == 6 and rank in (0, 2):
        gradient *= 100
    if gradient.max() > 10:
        dist.all_reduce(gradient.norm())  # <- here
    dist.all_reduce(gradient)  # <- here
