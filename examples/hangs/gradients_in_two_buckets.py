"""Rank 1 reads another bucket size from its environment and reduces its gradients in two halves."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

buckets = 2 if rank == 1 else 1
gradients = torch.ones(64)
for _ in range(8):
    for part in gradients.chunk(buckets):
        dist.all_reduce(part)  # <- here
