"""The metrics are reduced as one tensor of as many elements as there are keys: rank 1 has one key more."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    metrics = {"loss": 1.0, "norm": 2.0}
    if rank == 1 and step == 8:
        metrics["overflow"] = 1.0
    dist.all_reduce(torch.tensor(list(metrics.values())))  # <- here
