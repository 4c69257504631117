"""Nothing is wrong: a pipeline with tags, a subgroup, and a thread with a group of its own."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

savers = dist.new_group(list(range(world)), group_desc="savers")
activations = torch.ones(8)
for step in range(10):
    if rank > 0:
        dist.recv(activations, rank - 1, tag=step)
    if rank < world - 1:
        dist.send(activations, rank + 1, tag=step)
    saver = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2), group=savers))
    saver.start()
    dist.all_reduce(torch.ones(8))
    saver.join()
dist.barrier()
