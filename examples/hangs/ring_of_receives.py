"""Every rank receives from the one before it and then sends to the next: nobody sends first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = torch.ones(8)
for step in range(12):
    dist.barrier()
    if step == 8 or rank % 2:
        dist.recv(buffer, (rank - 1) % world)  # <- here
        dist.send(buffer, (rank + 1) % world)
    elif world % 2 == 0:
        dist.send(buffer, (rank + 1) % world)
        dist.recv(buffer, (rank - 1) % world)
