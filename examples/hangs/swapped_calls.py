"""Rank 2 starts two asynchronous calls in the other order: a dictionary was filled in another order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def reduce_loss():
    return dist.all_reduce(torch.ones(1), async_op=True)  # <- here


def gather_metrics():
    return dist.all_gather([torch.empty(4) for _ in range(world)], torch.ones(4), async_op=True)  # <- here


for step in range(12):
    calls = [reduce_loss, gather_metrics]
    works = [call() for call in (reversed(calls) if rank == 2 and step == 8 else calls)]
    for work in works:
        work.wait()
