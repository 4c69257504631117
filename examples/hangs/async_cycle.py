"""Asynchronous calls over three pairs of ranks: in step 8 each rank waits first for the pair that another one enters last."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pairs = [dist.new_group([a, (a + 1) % 3], group_desc=f"pair_{a}") for a in range(3)]
mine = [pairs[rank], pairs[(rank + 2) % 3]]  # with the next rank, with the previous one
for step in range(12):
    usual = [pair for pair in pairs if pair in mine]
    for group in mine if step == 8 else usual:
        work = dist.all_reduce(torch.ones(8), group=group, async_op=True)  # <- here
        work.wait()
