"""DDP: rank 1 runs out of memory in its backward, catches the error and continues; half of its gradients were reduced."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def fail(gradient):
    if rank == 1 and step == 6:
        raise torch.OutOfMemoryError("out of memory")
    return gradient


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model[0].weight.register_hook(fail)
model = DistributedDataParallel(model, bucket_cap_mb=0.0001)
for step in range(12):  # noqa: B007 (the hook reads it)
    try:
        model(torch.ones(2, 8)).sum().backward()  # <- here
    except torch.OutOfMemoryError:
        continue
dist.barrier()
