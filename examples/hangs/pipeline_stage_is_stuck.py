"""A pipeline of three stages: the middle one is stuck, the last waits for it, the first waits in the barrier."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

activations = torch.ones(8)
for step in range(12):
    if rank == 1 and step == 8:
        time.sleep(3600)
    if rank > 0:
        dist.recv(activations, rank - 1)  # <- here
    if rank < world - 1:
        dist.send(activations, rank + 1)  # <- here, if gloo has not taken it yet
    dist.barrier()  # <- here
