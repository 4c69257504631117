"""HSDP: rank 3 is killed; its partners of both groups wait."""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
for step in range(12):
    if rank == 3 and step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(8), group=mesh.get_group("shard"))  # <- here
    dist.all_reduce(torch.ones(8), group=mesh.get_group("replica"))  # <- here
