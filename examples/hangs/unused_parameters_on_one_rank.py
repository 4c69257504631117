"""DDP: only rank 1 asks for find_unused_parameters, which costs one more all_reduce in every backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model = DistributedDataParallel(model, find_unused_parameters=rank == 1)
for _step in range(12):
    model(torch.ones(2, 8)).sum().backward()  # <- here
