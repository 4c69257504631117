"""Rank 1 makes two groups in another order than the others: all ranks wait in new_group."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for _ in range(4):
    dist.all_reduce(torch.ones(8))
pairs = [[0, 1], [1, 2]]
groups = [dist.new_group(pair) for pair in (reversed(pairs) if rank == 1 else pairs)]
for group in groups:
    if dist.get_rank(group) >= 0:
        dist.all_reduce(torch.ones(8), group=group)
