"""Rank 1 calls monitored_barrier where the others call barrier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 1 and step == 8:
        dist.monitored_barrier()  # <- here
    elif step % 4 == 0:
        dist.barrier()
