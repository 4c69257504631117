"""A pipeline of three stages: stage 1 catches an error of a micro-batch and does not pass it on."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(6):
    for micro in range(3):
        x = torch.ones(8)
        if rank > 0:
            dist.recv(x, rank - 1)  # <- here
        try:
            if rank == 1 and step == 4 and micro == 1:
                raise FloatingPointError("overflow")
            if rank < 2:
                dist.send(x, rank + 1)  # <- here
        except FloatingPointError:
            continue
    dist.all_reduce(torch.ones(16))  # <- here
