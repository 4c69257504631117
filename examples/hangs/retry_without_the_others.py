"""Rank 2's data fails to load; it retries the step from the start, with the broadcast of the batch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def step_of(number):
    dist.broadcast(torch.ones(8), 0)  # <- here
    if rank == 2 and number == 5 and not failed:
        failed.append(True)
        raise OSError("read error")
    dist.all_reduce(torch.ones(16))  # <- here


failed = []
for number in range(9):
    try:
        step_of(number)
    except OSError:
        step_of(number)  # <- here
