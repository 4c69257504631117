"""DDP: only rank 0 evaluates, with the wrapped model; its forward broadcasts the buffers of the batch norm."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
model = DistributedDataParallel(model)
for step in range(12):
    model(torch.randn(4, 8)).sum().backward()
    if step == 7 and rank == 0:
        model.eval()
        model(torch.randn(4, 8))  # <- here
        model.train()
