"""Rank 2 runs an older version of the model, whose blocks have one reduction less."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def old_block(x):
    dist.all_reduce(x)  # <- here


def new_block(x):
    dist.all_reduce(x)  # <- here
    dist.all_reduce(x)  # <- here


for _ in range(6):
    for _layer in range(2):
        old_block(torch.ones(16)) if rank == 2 else new_block(torch.ones(16))
    dist.all_gather([torch.ones(1) for _ in range(world)], torch.ones(1))  # <- here
