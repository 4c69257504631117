"""Tensor and data parallel: rank 3 skips a block by a condition on its own data."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
blocks = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)) for _ in range(3)]
for block in blocks:
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
for step in range(8):
    x = torch.ones(2, 8)
    for index, block in enumerate(blocks):
        if not (rank == 3 and step == 5 and index == 1):
            x = block(x)  # <- here
            x = x.wait() if hasattr(x, "wait") else x  # <- here
    dist.all_reduce(x.detach(), group=mesh.get_group("dp"))  # <- here
