"""Rank 0 redistributes a DTensor to print it; the others do not."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh("cpu", (world,))
weights = distribute_tensor(torch.ones(world * 2, 4), mesh, [Shard(0)])
for step in range(12):
    weights.redistribute(placements=[Replicate()])
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step == 8:
        print(weights.full_tensor())  # <- here
