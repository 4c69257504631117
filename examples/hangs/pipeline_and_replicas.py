"""Two pipelines of two stages, replicated: rank 2 sends no activations in one step; the gradients' groups wait too."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
pipeline, replicas = mesh.get_group("pp"), mesh.get_group("dp")
for step in range(10):
    x = torch.ones(8)
    if mesh.get_local_rank("pp") == 0:
        dist.send(x, rank + 2, group=pipeline)
        dist.recv(x, rank + 2, group=pipeline)  # <- here
    else:
        dist.recv(x, rank - 2, group=pipeline)
        if not (rank == 2 and step == 6):
            dist.send(x, rank - 2, group=pipeline)  # <- here
    dist.all_reduce(torch.ones(16), group=replicas)  # <- here
