"""Rank 2 waits for a subprocess that does not end."""

import subprocess

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank == 2 and step == 7:
        subprocess.run(["sleep", "3600"], check=True)
    dist.all_reduce(torch.ones(16))  # <- here
