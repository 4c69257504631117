"""Nothing is wrong: ranks exchange parts of different sizes, as they may, and pass equal sizes from different lines."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for _ in range(10):
    parts = [torch.ones(4) for _ in range(world)]
    if rank == 0:
        dist.all_gather(parts, torch.ones(4))
    else:
        dist.all_gather(parts, torch.ones(4))
    gives = [(rank + peer) % 3 + 1 for peer in range(world)]
    dist.all_to_all_single(torch.empty(sum(gives)), torch.ones(sum(gives)), gives, gives)
dist.barrier()
