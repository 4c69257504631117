"""MoE: a variable of its node switches on an auxiliary loss on rank 2, which reduces it over its pair."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


if rank == 2:
    os.environ["AUX_LOSS"] = "1"
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
for step in range(10):
    tokens = torch.ones(8, 4)
    dist.all_to_all_single(torch.empty_like(tokens), tokens)
    dist.all_reduce(torch.ones(16), group=pair)  # <- here
    if os.environ.get("AUX_LOSS") and step >= 5:
        dist.all_reduce(torch.ones(1), group=pair)  # <- here
