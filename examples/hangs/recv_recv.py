"""Two ranks exchange, and both receive first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = torch.ones(8)
for step in range(12):
    dist.all_reduce(torch.ones(4))
    if rank < 2 and step == 8:
        dist.recv(buffer, 1 - rank)  # <- here
        dist.send(buffer, 1 - rank)
