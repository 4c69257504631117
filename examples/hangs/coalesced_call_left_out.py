"""Gradients are reduced in one coalesced batch; rank 2 leaves out a parameter without gradient."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

parameters = [torch.nn.Parameter(torch.ones(4 * (i + 1))) for i in range(3)]
for step in range(8):
    for i, parameter in enumerate(parameters):
        parameter.grad = None if rank == 2 and step == 5 and i == 1 else torch.ones_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    dist.all_reduce_coalesced(gradients)  # <- here
