"""Rank 2 skips a reduce to rank 0 and continues; the others but the root have finished theirs."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if not (rank == 2 and step == 7):
        dist.reduce(torch.ones(16), 0)  # <- here
    dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))
