"""Ranks draw which expert to train by their own random numbers: in one step rank 0 draws another group."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
for step in range(10):
    dist.all_reduce(torch.ones(4))
    first = step % 2 == 0 if not (rank == 0 and step == 7) else True
    group = pairs[rank // 2] if first else others[rank % 2]
    dist.all_reduce(torch.ones(16), group=group)  # <- here
