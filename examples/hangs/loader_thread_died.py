"""Loader threads agree on samples over a group of their own: that of rank 2 has died of an error."""

import queue
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


data = dist.new_group(group_desc="data")
batches = queue.Queue(maxsize=1)


def load():
    for number in range(12):
        if rank == 2 and number == 7:
            raise ValueError("bad sample")
        dist.all_reduce(torch.ones(2), group=data)  # <- here
        batches.put(torch.ones(16))


threading.Thread(target=load, daemon=True).start()
for _ in range(12):
    dist.all_reduce(batches.get())  # <- here
