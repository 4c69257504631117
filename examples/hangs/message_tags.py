"""Send and receive use different tags for the same message."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
buffer = torch.ones(8)
for step in range(12):
    if rank == 0:
        dist.send(buffer, 1, tag=step)
    if rank == 1:
        dist.recv(buffer, 0, tag=step if step != 8 else step + 1)  # <- here
    dist.barrier()
