"""DDP: in one step rank 2 calls the model inside the wrapper, and its gradients are not reduced."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(10):
    forward = model.module if rank == 2 and step == 6 else model
    forward(torch.ones(2, 8)).sum().backward()  # <- here
    if step % 5 == 4:
        dist.all_gather([torch.ones(1) for _ in range(world)], torch.ones(1))  # <- here
