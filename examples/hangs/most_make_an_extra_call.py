"""All ranks but rank 0, which has the result in its cache, gather it once."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    cached = rank == 0 and step == 7
    if step % 4 == 3 and not cached:
        dist.all_gather([torch.empty(4) for _ in range(world)], torch.ones(4))  # <- here
    dist.all_reduce(torch.ones(16))
