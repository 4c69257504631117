"""Rank 0 broadcasts every tensor of the checkpoint; rank 2 has one key less and takes one broadcast less."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

state = {"embed": 32, "bias": 4, "head": 16, "scale": 1}
if rank == 2:
    del state["bias"]
dist.all_reduce(torch.ones(2))
for _name, size in state.items():
    dist.broadcast(torch.ones(size), 0)  # <- here
for _ in range(5):
    dist.all_reduce(torch.ones(64))
