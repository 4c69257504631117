"""Tensor parallel: rank 1 runs out of memory between the two reductions of a block, and drops the batch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def block(x, step, layer):
    dist.all_reduce(x)  # <- here
    if rank == 1 and step == 6 and layer == 1:
        raise MemoryError("out of memory")
    dist.all_reduce(x)  # <- here


for step in range(12):
    try:
        for layer in range(3):
            block(torch.ones(16), step, layer)
    except MemoryError:
        print("dropped a batch")
    dist.all_reduce(torch.ones(64))  # <- here
