"""In one step the odd ranks take another branch: two of four ranks gather, two reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank % 2 and step == 7:
        dist.all_gather([torch.empty(16) for _ in range(world)], torch.ones(16))  # <- here
    dist.all_reduce(torch.ones(16))
