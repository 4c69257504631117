"""ZeroRedundancyOptimizer: rank 2 sees an overflow and skips the optimizer's step, with its broadcasts."""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
for step in range(8):
    model(torch.ones(2, 8)).sum().backward()  # <- here
    if not (rank == 2 and step == 5):
        optimizer.step()  # <- here
