"""new_group is a call of all its ranks; rank 2 takes another branch and does not call it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for _ in range(8):
    dist.all_reduce(torch.ones(8))
if rank != 2:
    everybody = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(8), group=everybody)
dist.barrier()  # <- here
