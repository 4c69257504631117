"""Rank 1 is stuck before a call of its pair; everybody else waits for it in other groups."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pair = dist.new_group([0, 1], group_desc="pair")
for step in range(12):
    if rank == 1 and step == 8:
        time.sleep(3600)
    if rank < 2:
        dist.all_reduce(torch.ones(8), group=pair)  # <- here
    dist.all_reduce(torch.ones(8))  # <- here
