"""A parameter server answers the wrong worker: rank 2 waits for its parameters."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    for worker in (1, 2):
        if rank == 0:
            dist.recv(torch.ones(8), worker)
            dist.send(torch.ones(8), 1 if step == 5 else worker)  # <- here
        elif rank == worker:
            dist.send(torch.ones(8), 0)
            dist.recv(torch.ones(8), 0)  # <- here
