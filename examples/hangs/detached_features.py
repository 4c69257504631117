"""Contrastive loss over gathered features: rank 2 detaches them in one step, so its backward has no reduction."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


for step in range(10):
    features = torch.ones(6, requires_grad=True)
    total = all_reduce(features * 2)  # <- here
    if rank == 2 and step == 6:
        total = total.detach() + features
    total.sum().backward()  # <- here
    dist.all_gather([torch.ones(1) for _ in range(world)], torch.ones(1))  # <- here
