"""A thread saves a checkpoint over the group that DDP uses: the same calls, in another order on rank 1."""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def save():
    time.sleep(0.3 if rank == 1 else 0)  # which thread comes first is chance
    dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))  # <- here


for step in range(12):
    if step == 8:
        threading.Thread(target=save, name="saver-0", daemon=True).start()
        time.sleep(0 if rank == 1 else 0.3)
    dist.all_reduce(torch.ones(64))  # <- here
