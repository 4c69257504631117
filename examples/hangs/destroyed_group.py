"""Rank 2 destroys its group in a cleanup and lives on; the others make one more call."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for _ in range(8):
    dist.all_reduce(torch.ones(8))
if rank == 2:
    dist.destroy_process_group()
    time.sleep(3600)
dist.all_reduce(torch.ones(8))  # <- here
