"""Nothing is wrong: a group is made for every epoch and destroyed behind it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for epoch in range(3):
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(torch.ones(8), group=group)
        dist.destroy_process_group(group)
    seen = [None] * world
    dist.all_gather_object(seen, {"epoch": epoch, "rank": "x" * rank})
dist.barrier()
