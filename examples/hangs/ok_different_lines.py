"""Nothing is wrong: ranks make the same calls from different lines, with views of different shapes."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for _step in range(12):
    if rank == 0:
        dist.broadcast(torch.ones(16), 0)
    else:
        dist.broadcast(torch.empty(4, 4), 0)
    if rank == 2:
        dist.all_reduce(torch.ones(2, 8))
    else:
        dist.all_reduce(torch.ones(16))
dist.barrier()
