"""Rank 1 reduces with MAX where the others sum."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    op = dist.ReduceOp.MAX if rank == 1 and step == 8 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(8), op=op)  # <- here
