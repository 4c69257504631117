"""Nothing is wrong: messages are received in another order than they were sent, told apart by tags."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for _step in range(10):
    a, b = torch.ones(4), torch.ones(8)
    if rank == 0:
        works = [dist.isend(a, 1, tag=1), dist.isend(b, 1, tag=2)]
    else:
        works = [dist.irecv(b, 0, tag=2), dist.irecv(a, 0, tag=1)]
    for work in works:
        work.wait()
dist.barrier()
