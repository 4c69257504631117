"""As random_layer_drop, but all layers have the same size: the difference shows only in the lines."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    dist.all_reduce(torch.ones(8))
    if not (rank == 2 and step == 8):
        dist.all_reduce(torch.ones(8))  # <- here
    dist.all_reduce(torch.ones(8))
