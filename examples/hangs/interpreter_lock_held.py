"""Rank 2 calls a C function that keeps the interpreter's lock: none of its threads runs."""

import ctypes

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


library = ctypes.PyDLL(None)
for step in range(10):
    if rank == 2 and step == 6:
        library.sleep(3600)
    dist.all_reduce(torch.ones(16))  # <- here
