"""Rank 1 waits for a key of the store that nobody sets."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

store = dist.distributed_c10d._get_default_store()
for step in range(12):
    if rank == 1 and step == 8:
        store.wait(["new_config"], timedelta(hours=1))
    dist.all_reduce(torch.ones(8))  # <- here
