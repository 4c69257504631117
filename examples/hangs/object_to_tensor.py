"""Rank 0 sends an object where rank 1 receives a tensor."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    if rank == 0:
        if step == 5:
            dist.send_object_list([{"lr": 0.1, "steps": list(range(50))}], 1)  # <- here
        else:
            dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(torch.ones(4), 0)  # <- here
    dist.all_reduce(torch.ones(16))  # <- here
