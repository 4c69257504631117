"""Rank 1 receives a message that nobody sends, the first of the job, while all others wait in a broadcast."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(3):
    dist.all_reduce(torch.ones(16))
    if rank == 1 and step == 2:
        dist.recv(torch.ones(4), 2)  # <- here
    dist.broadcast(torch.ones(4), 0)
    dist.barrier()
