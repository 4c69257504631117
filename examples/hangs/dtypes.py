"""Rank 1 runs one step without autocast: float against half."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    dtype = torch.float32 if rank == 1 and step == 8 else torch.float16
    dist.all_reduce(torch.ones(8, dtype=dtype))  # <- here
    dist.barrier()
