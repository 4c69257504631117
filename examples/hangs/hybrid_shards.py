"""HSDP: shards within a node, replicas across; rank 3 is stuck and both kinds of group wait."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
for step in range(12):
    if rank == 3 and step == 8:
        time.sleep(3600)
    dist.all_reduce(torch.ones(8), group=mesh.get_group("shard"))  # <- here
    dist.all_reduce(torch.ones(8), group=mesh.get_group("replica"))  # <- here
