"""DDP with a communication hook that reduces once more on rank 0, to log the norm."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

calls = []


def hook(state, bucket):
    gradient = bucket.buffer()
    calls.append(gradient.numel())
    if rank == 0 and len(calls) == 6:
        dist.all_reduce(gradient.norm().reshape(1))  # <- here
    work = dist.all_reduce(gradient, async_op=True)  # <- here
    return work.get_future().then(lambda future: future.value()[0] / world)


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
model.register_comm_hook(None, hook)
for _ in range(10):
    model(torch.ones(2, 8)).sum().backward()  # <- here
