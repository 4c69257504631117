"""A collector takes two messages from anyone; rank 2 is busy and never sends its own."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    x = torch.ones(8)
    if rank == 0:
        for _ in range(world - 1):
            dist.recv(x)  # <- here
    else:
        if rank == 2 and step == 6:
            time.sleep(3600)
        dist.send(x, 0)
    dist.barrier()  # <- here
