"""Gradients are reduced in the order of a set, which is another one on every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

gradients = [torch.ones(8), torch.ones(16), torch.ones(32)]
for _ in range(4):
    dist.all_reduce(torch.ones(4))
for gradient in gradients[rank:] + gradients[:rank]:
    dist.all_reduce(gradient)  # <- here
