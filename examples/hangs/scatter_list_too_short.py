"""Rank 0 scatters a list that is too short; the error is caught and the call was never made."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    parts = [{"part": i} for i in range(world - (step == 5))]
    mine = [None]
    try:
        dist.scatter_object_list(mine, parts if rank == 0 else None, src=0)  # <- here
    except Exception as error:
        print(error)
    dist.all_reduce(torch.ones(16))  # <- here
