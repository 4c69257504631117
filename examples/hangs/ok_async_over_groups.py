"""Nothing is wrong: asynchronous calls over three groups, waited for in another order on every rank."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pairs = [dist.new_group([a, (a + 1) % 3]) for a in range(3)]
for _step in range(12):
    mine = [pairs[rank], pairs[(rank + 2) % 3]]
    works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for group in mine]
    for work in reversed(works) if rank == 1 else works:
        work.wait()
dist.barrier()
