"""Tensor and pipeline parallel: the last stage leaves out the all_reduce of the tied embeddings in one step."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
embedding = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
for step in range(12):
    x = torch.ones(8)
    if rank < 2:
        dist.send(x, rank + 2)
    else:
        dist.recv(x, rank - 2)
    dist.all_reduce(x, group=tensor)  # <- here
    if not (rank == 3 and step == 7):
        dist.all_reduce(torch.ones(32), group=embedding)  # <- here
