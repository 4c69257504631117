"""Nothing is wrong: objects of different sizes are gathered and broadcast, every third step."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    dist.all_reduce(torch.ones(16))
    if step % 3 == 2:
        dist.all_gather_object([None] * world, "x" * (10 * rank + step))
        dist.broadcast_object_list([step if rank == 0 else None], 0)
        dist.gather_object(list(range(rank)), [None] * world if rank == 0 else None, 0)
dist.barrier()
dist.destroy_process_group()
