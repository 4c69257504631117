"""Nothing is wrong: rank 0 evaluates in a group of its own while the others wait for it, then all go on."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


alone = [dist.new_group([r]) for r in range(world)][rank]
for step in range(8):
    dist.all_reduce(torch.ones(16))
    if rank == 0 and step == 4:
        for _ in range(5):
            dist.all_reduce(torch.ones(3), group=alone)
        time.sleep(0.3)
    dist.barrier()
dist.destroy_process_group()
