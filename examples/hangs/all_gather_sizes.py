"""all_gather_into_tensor needs equal parts of all ranks: rank 1 brings a longer one."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    part = torch.ones(6 if rank == 1 and step == 8 else 4)
    whole = torch.empty(world * len(part))
    dist.all_gather_into_tensor(whole, part)  # <- here
    dist.barrier()
