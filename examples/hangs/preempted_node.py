"""Only rank 1 is told that its node is to be preempted: it saves, with a barrier, while the others train on."""

import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def save_and_leave(*_):
    dist.barrier()  # <- here
    sys.exit(0)


signal.signal(signal.SIGTERM, save_and_leave)
for step in range(10):
    dist.all_reduce(torch.ones(16))
    dist.broadcast(torch.ones(4), 0)
    if rank == 1 and step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
