"""Six ranks in two stages of three: rank 4 is stuck in its optimizer; its stage, and then the other, wait."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


stage = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])][rank // 3]
for step in range(8):
    x = torch.ones(8)
    if rank < 3:
        dist.send(x, rank + 3)
        dist.recv(x, rank + 3)
    else:
        dist.recv(x, rank - 3)
        dist.send(x, rank - 3)
    if rank == 4 and step == 5:
        time.sleep(3600)
    dist.all_reduce(torch.ones(16), group=stage)  # <- here
