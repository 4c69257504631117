"""Two models on two groups: rank 1 trains its critic once more before it comes to the actor's exchange."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

critics = dist.new_group([0, 1], group_desc="critics")
actors = dist.new_group([0, 1, 2, 3], group_desc="actors")
for step in range(9):
    for _ in range(3 if rank == 1 and step == 6 else 2):
        if rank < 2:
            dist.all_reduce(torch.ones(8), group=critics)  # <- here
    dist.all_reduce(torch.ones(32), group=actors)  # <- here
