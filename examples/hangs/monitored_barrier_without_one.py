"""Rank 2 is busy and does not come to the monitored barrier."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 2 and step == 8:
        time.sleep(3600)
    if step % 8 == 0:
        dist.monitored_barrier(timeout=timedelta(hours=1))  # <- here
