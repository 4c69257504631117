"""Rank 0 pads its gradient to another size before reduce_scatter."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    size = 8 if rank == 0 and step == 8 else 4
    dist.reduce_scatter_tensor(torch.empty(size), torch.ones(world * size))  # <- here
    dist.barrier()
