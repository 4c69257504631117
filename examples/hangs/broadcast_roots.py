"""ZeRO: rank 2 takes itself for the owner of a shard and broadcasts where the others expect it from rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    owner = 2 if rank == 2 and step == 8 else 0
    dist.broadcast(torch.ones(8), owner)  # <- here
    dist.barrier()
