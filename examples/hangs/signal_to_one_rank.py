"""Only rank 1 gets the signal that asks for a checkpoint, and enters its barrier."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(True))
for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 1 and step == 8:
        os.kill(os.getpid(), signal.SIGUSR1)
    if wanted:
        dist.barrier()  # <- here
