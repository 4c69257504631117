"""Nothing is wrong: the root of broadcasts runs ahead and leaves first."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for _ in range(12):
    dist.broadcast(torch.ones(4), 0)
    if rank == 2:
        time.sleep(0.02)
dist.barrier()
