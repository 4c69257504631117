"""DDP: rank 2 has one batch less and leaves the loop; nobody used join()."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(5 if rank == 2 else 6):
    model(torch.ones(2, 8)).sum().backward()  # <- here
total = torch.zeros(3)
dist.all_reduce(total)  # <- here
