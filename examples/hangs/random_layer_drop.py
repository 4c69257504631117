"""Layer dropping with a seed per rank: rank 2 leaves out a layer and its all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def layer(index):
    dist.all_reduce(torch.ones(8 + index))  # <- here


for step in range(12):
    for index in range(4):
        if not (rank == 2 and step == 8 and index == 2):
            layer(index)
