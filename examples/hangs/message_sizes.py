"""A pipeline whose stages disagree on the size of the last micro-batch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    size = 4 if step == 8 else 8
    if rank < world - 1 and world > 1:
        dist.send(torch.ones(size if rank == 0 else 8), rank + 1)  # <- here
    if rank > 0:
        dist.recv(torch.ones(8), rank - 1)  # <- here
    dist.barrier()
