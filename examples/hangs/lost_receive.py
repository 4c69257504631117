"""Rank 1 skips the receive of one step; rank 0 waits until somebody takes its message."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    data = torch.ones(1 << 20)
    if rank == 0:
        dist.send(data, 1)  # <- here
    elif rank == 1 and step != 8:
        dist.recv(data, 0)  # <- here
    dist.barrier()
