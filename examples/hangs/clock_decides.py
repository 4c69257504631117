"""Every rank saves when its own clock says so: rank 2 comes to it one step early."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(20):
    dist.all_reduce(torch.ones(8))
    minutes = step + (1 if rank == 2 and step >= 13 else 0)
    if minutes % 7 == 0 and step > 0:
        dist.barrier()  # <- here
