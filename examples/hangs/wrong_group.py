"""Rank 1 reduces over all ranks where its partner reduces over the pair."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pair = dist.new_group([0, 1], group_desc="pair")
for step in range(12):
    if rank < 2:
        group = None if rank == 1 and step == 8 else pair
        dist.all_reduce(torch.ones(8), group=group)  # <- here
    dist.all_reduce(torch.ones(16))  # <- here
