"""Context parallel: the keys and values go around a ring; rank 2 leaves one round early."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(10):
    for _hop in range(2 if rank == 2 and step == 6 else 3):
        sent, taken = torch.ones(8), torch.ones(8)
        ops = [dist.P2POp(dist.isend, sent, (rank + 1) % world)]  # <- here
        ops.append(dist.P2POp(dist.irecv, taken, (rank - 1) % world))  # <- here
        for work in dist.batch_isend_irecv(ops):  # <- here
            work.wait()
    dist.all_reduce(torch.ones(4))
