"""The loader thread of rank 1 has ended; its training loop waits for a batch."""

import queue

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

batches: queue.Queue[torch.Tensor] = queue.Queue()
for _ in range(8 if rank == 1 else 12):
    batches.put(torch.ones(8))
for _ in range(12):
    dist.all_reduce(batches.get())  # <- here
