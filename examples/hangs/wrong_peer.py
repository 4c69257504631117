"""Rank 2 receives from rank 0, but it is rank 1 that sends to it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = torch.ones(8)
for step in range(12):
    if rank == 0:
        dist.send(buffer, 1)
    elif rank == 1:
        dist.recv(buffer, 0)
        dist.send(buffer, 2)
    else:
        dist.recv(buffer, 0 if step == 0 else 1)  # <- here
    dist.barrier()
