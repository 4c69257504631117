"""Of two ranks one evaluates: what they did before shows who is wrong."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    dist.all_reduce(torch.ones(8))
    if step % 4 == 3 or (rank == 1 and step == 9):
        dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))  # <- here
