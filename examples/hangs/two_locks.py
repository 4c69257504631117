"""Two threads of rank 1 take two locks in different order, and the main thread never comes to its call."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

one, two = threading.Lock(), threading.Lock()
both = threading.Barrier(2)


def worker():
    with two:
        both.wait()
        one.acquire()


for step in range(12):
    if rank == 1 and step == 8:
        threading.Thread(target=worker, daemon=True).start()
        with one:
            both.wait()
            two.acquire()
    dist.all_reduce(torch.ones(8))  # <- here
