"""Rank 1 repeats a failed step, with its two calls; the numbers agree until the end."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def train_step():
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(16))


def repeat_step():
    dist.all_reduce(torch.ones(1))  # <- here
    dist.all_reduce(torch.ones(16))


for step in range(12):
    train_step()
    if rank == 1 and step == 6:
        repeat_step()
dist.barrier()
