"""Nothing is wrong: one pair of ranks makes many more calls than the other, and a rank of it leaves early."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
for _step in range(40 if rank < 2 else 5):
    dist.all_reduce(torch.ones(8), group=pairs[rank // 2])
dist.barrier()
if rank < 2:
    dist.all_reduce(torch.ones(4), group=pairs[0])
dist.destroy_process_group()
