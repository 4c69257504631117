"""Rank 1 is killed, as the out-of-memory killer does."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

loss = torch.ones(8)
for step in range(100):
    if rank == 1 and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(loss)  # <- here
