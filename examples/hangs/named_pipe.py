"""Rank 2 opens a named pipe that nobody writes to."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    if rank == 2 and step == 8:
        path = os.path.join(tempfile.mkdtemp(), "samples")
        os.mkfifo(path)
        Path(path).read_text()
    dist.all_reduce(torch.ones(8))  # <- here
