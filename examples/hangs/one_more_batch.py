"""The shard of rank 0 has one batch more: it waits in an all_reduce that nobody else makes."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
batches = 8 if rank == 0 else 7
for _ in range(batches):
    gradient = torch.ones(16)
    dist.all_reduce(gradient)  # <- here
dist.barrier()  # <- here
