"""A pipeline of three stages: in the cool-down stage 1 receives gradients before it has sent its last activations."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    x = torch.ones(8)
    if rank > 0:
        dist.recv(x, rank - 1)  # <- here
    if rank == 1 and step == 6:
        dist.recv(x, 2)  # <- here
        dist.send(x, 2)
    elif rank == 1:
        dist.send(x, 2)
        dist.recv(x, 2)
    elif rank == 0:
        dist.send(x, 1)
    else:
        dist.send(x, 1)
    dist.barrier()
