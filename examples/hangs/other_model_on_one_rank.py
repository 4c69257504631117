"""DDP: the model of rank 1 has one layer more, by a configuration of its node."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


layers = [torch.nn.Linear(8, 8) for _ in range(3 if rank == 1 else 2)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))  # <- here
for _step in range(6):
    model(torch.ones(2, 8)).sum().backward()
