"""Nothing is wrong: DDP, a gather of metrics, a clean end."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(10):
    model(torch.ones(2, 8)).sum().backward()
    dist.all_gather_object([None] * world, {"loss": step})
dist.destroy_process_group()
