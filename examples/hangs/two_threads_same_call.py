"""Two threads reduce over one group; on rank 2 they come in the other order, with other sizes."""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def report_metrics():
    time.sleep(0 if rank == 2 else 0.3)
    dist.all_reduce(torch.ones(3))  # <- here


for step in range(12):
    if step == 7:
        threading.Thread(target=report_metrics, name="metrics", daemon=True).start()
        time.sleep(0.3 if rank == 2 else 0)
    dist.all_reduce(torch.ones(64))  # <- here
    if step == 7:
        time.sleep(1)
