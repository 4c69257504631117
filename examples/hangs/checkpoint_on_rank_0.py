"""torch.distributed.checkpoint.save is a collective; only rank 0 calls it."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step == 8:
        dcp.save({"weights": torch.ones(4)}, checkpoint_id=tempfile.mkdtemp())  # <- here
