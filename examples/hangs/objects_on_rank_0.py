"""Only rank 0 broadcasts its configuration."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step == 8:
        dist.broadcast_object_list([{"lr": 0.1}], src=0)  # <- here
