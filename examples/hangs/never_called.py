"""Rank 1 joins the group and then builds its data set for an hour, before its first call."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

if rank == 1:
    time.sleep(3600)
for _ in range(12):
    dist.all_reduce(torch.ones(8))  # <- here
