"""Nothing is wrong: a collector takes messages in the order they come."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for _step in range(10):
    x = torch.ones(8)
    if rank == 0:
        for _ in range(world - 1):
            dist.recv(x)
    else:
        dist.send(x, 0)
dist.barrier()
