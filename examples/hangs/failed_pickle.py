"""all_gather_object: an object of rank 1 cannot be pickled; the error is caught and the call was never made."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    metrics = {"step": step} if not (rank == 1 and step == 6) else {"open": (i for i in range(2))}
    try:
        dist.all_gather_object([None] * world, metrics)  # <- here
    except TypeError:
        pass
    dist.all_reduce(torch.ones(16))  # <- here
