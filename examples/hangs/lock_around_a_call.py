"""A logging thread and the training loop share a lock and each waits in a call of its own group while it holds it."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


metrics = dist.new_group([0, 1], group_desc="metrics")
lock = threading.Lock()


def log():
    with lock:
        dist.all_reduce(torch.ones(2), group=metrics)  # <- here


for step in range(10):
    thread = threading.Thread(target=log, daemon=True)
    if step == 7 and rank == 1:  # which of the two takes the lock first is chance
        with lock:
            thread.start()
            dist.all_reduce(torch.ones(16))  # <- here
    else:
        thread.start()
        thread.join(None if step != 7 else 0.3)
        with lock:
            dist.all_reduce(torch.ones(16))  # <- here
    thread.join()
