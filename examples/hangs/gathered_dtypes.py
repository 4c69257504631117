"""Rank 2 keeps its shard in another precision and gathers float where the others gather bfloat16."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    dtype = torch.float32 if rank == 2 and step == 5 else torch.bfloat16
    shard = torch.ones(8, dtype=dtype)
    dist.all_gather_into_tensor(torch.empty(8 * world, dtype=dtype), shard)  # <- here
