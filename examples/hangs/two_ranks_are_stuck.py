"""Two of four ranks are stuck before the same call."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank in (1, 3) and step == 8:
        time.sleep(3600)
    dist.all_reduce(torch.ones(8))  # <- here
