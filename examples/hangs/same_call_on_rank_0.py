"""Rank 0 makes one more all_reduce of the same size, from another line: the calls no longer belong together."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def evaluate():
    dist.all_reduce(torch.ones(8))  # <- here


for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step == 8:
        evaluate()
dist.barrier()
