"""DDP: ranks 0 and 1 use join() for uneven inputs, rank 2 does not."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = DistributedDataParallel(torch.nn.Linear(8, 8))
with model.join() if rank != 2 else contextlib.nullcontext():  # <- here
    for _step in range(6):
        model(torch.ones(2, 8)).sum().backward()  # <- here
