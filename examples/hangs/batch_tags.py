"""batch_isend_irecv with the step as tag: rank 2 counts one step less."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    sent, taken = torch.ones(8), torch.ones(8)
    tag = step - 1 if rank == 2 and step == 8 else step
    ops = [dist.P2POp(dist.isend, sent, (rank + 1) % world, tag=tag)]  # <- here
    ops.append(dist.P2POp(dist.irecv, taken, (rank - 1) % world, tag=tag))  # <- here
    for work in dist.batch_isend_irecv(ops):  # <- here
        work.wait()
