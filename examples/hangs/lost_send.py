"""Rank 0 skips the send of one step; rank 1 waits for the message."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = torch.ones(8)
for step in range(12):
    if rank == 0 and step != 8:
        dist.send(buffer, 1)
    if rank == 1:
        dist.recv(buffer, 0)  # <- here
    dist.barrier()
