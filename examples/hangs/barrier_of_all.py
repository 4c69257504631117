"""In one step rank 1 calls the barrier of all ranks where its partner calls that of their pair."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
for step in range(10):
    dist.all_reduce(torch.ones(16), group=pair)
    dist.barrier(group=None if rank == 1 and step == 6 else pair)  # <- here
    if step % 5 == 4:
        dist.all_reduce(torch.ones(1))  # <- here
