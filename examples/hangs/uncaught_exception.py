"""Rank 2 ends with an exception; the others wait for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def load_batch(step):
    if rank == 2 and step == 6:
        raise ValueError("sample 173 is truncated")
    return torch.ones(8)


for step in range(100):
    batch = load_batch(step)
    dist.all_reduce(batch)  # <- here
