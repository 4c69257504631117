"""Rank 3 reduces over the data-parallel group where the others reduce over the tensor-parallel one."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for step in range(12):
    name = "dp" if rank == 3 and step == 7 else "tp"
    dist.all_reduce(torch.ones(8), group=mesh.get_group(name))  # <- here
    dist.all_reduce(torch.ones(16), group=mesh.get_group("dp"))  # <- here
