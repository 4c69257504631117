"""A hand-made barrier over the store: rank 2 never comes to it; nobody is in a collective."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

store = dist.distributed_c10d._get_default_store()
for step in range(12):
    dist.all_reduce(torch.ones(16))
    if step == 7:
        if rank == 2:
            time.sleep(3600)
        store.set(f"ready/{rank}", "1")
        store.wait([f"ready/{other}" for other in range(world)])
