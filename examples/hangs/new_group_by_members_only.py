"""new_group must be called by all ranks; rank 2 is no member and does not call it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(8):
    dist.all_reduce(torch.ones(8))
if rank < 2:
    pair = dist.new_group([0, 1])  # <- here
    dist.all_reduce(torch.ones(8), group=pair)
dist.barrier()
