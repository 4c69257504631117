"""Which of two groups comes first depends on which gradient is ready first: in step 8 rank 1 takes the other order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

tp = dist.new_group([0, 1], group_desc="tp")
dp = dist.new_group([0, 1], group_desc="dp")
for step in range(12):
    other = step in (1, 2, 4, 7) or (rank == 1 and step == 8)
    for group in ([dp, tp] if other else [tp, dp]) if rank < 2 else []:
        dist.all_reduce(torch.ones(8), group=group)  # <- here
    dist.barrier()
