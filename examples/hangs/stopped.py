"""Rank 1 is stopped (SIGSTOP): a debugger, a frozen container."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank == 1 and step == 8:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(8))  # <- here
