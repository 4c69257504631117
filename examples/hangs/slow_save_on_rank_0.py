"""Rank 0 writes a checkpoint for an hour while the others wait in the barrier behind it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    dist.all_reduce(torch.ones(8))
    if step == 8:
        if rank == 0:
            time.sleep(3600)
        dist.barrier()  # <- here
