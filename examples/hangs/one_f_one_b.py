"""A pipeline of four stages, one forward one backward: rank 1 works on three micro-batches, the others on four."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def forward(x):
    if rank > 0:
        dist.recv(x, rank - 1)  # <- here
    if rank < world - 1:
        dist.send(x, rank + 1)  # <- here


def backward(x):
    if rank < world - 1:
        dist.recv(x, rank + 1)  # <- here
    if rank > 0:
        dist.send(x, rank - 1)  # <- here


for step in range(6):
    count = 3 if rank == 1 and step == 4 else 4
    for _ in range(count):
        forward(torch.ones(8))
        backward(torch.ones(8))
    dist.all_reduce(torch.ones(16))  # <- here
