"""Rank 1 leaves out the call of one group and continues with the next: it waits for rank 0, which waits for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

tp = dist.new_group([0, 1], group_desc="tp")
dp = dist.new_group([0, 1], group_desc="dp")
for step in range(12):
    if rank < 2:
        if not (rank == 1 and step == 8):
            dist.all_reduce(torch.ones(8), group=tp)  # <- here
        dist.all_reduce(torch.ones(4), group=dp)
    dist.barrier()
