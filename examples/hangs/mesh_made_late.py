"""Rank 3 makes its device mesh only after its first reduction; the others make it before."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(2))
if rank != 3:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dist.all_reduce(torch.ones(8))  # <- here
if rank == 3:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dist.all_reduce(torch.ones(8), group=mesh.get_group("dp"))
