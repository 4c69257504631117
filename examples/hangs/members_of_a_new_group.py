"""Rank 2 takes itself for a member of the group that the others make without it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for _ in range(4):
    dist.all_reduce(torch.ones(8))
group = dist.new_group([0, 1, 2] if rank == 2 else [0, 1])
dist.barrier()  # <- here
