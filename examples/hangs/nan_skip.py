"""Rank 1 sees NaN in its loss and skips the step, with its all_reduce; the next call that differs comes much later."""

import torch
import torch.distributed as dist

import allranks

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def sync(gradient):
    dist.all_reduce(gradient)  # <- here


for step in range(40):
    allranks.step(step)
    loss = float("nan") if rank == 1 and step == 9 else 1.0
    if loss != loss:
        continue
    sync(torch.ones(16))
    if step % 20 == 19:
        dist.barrier()
