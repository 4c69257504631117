"""MoE: rank 3 keeps another capacity for its experts and expects more tokens than the others send."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    capacity = 3 if rank == 3 and step == 6 else 2
    tokens = [torch.ones(2, 4) for _ in range(world)]
    taken = [torch.empty(capacity, 4) for _ in range(world)]
    dist.all_to_all_single(torch.cat(taken), torch.cat(tokens), [capacity] * world, [2] * world)  # <- here
