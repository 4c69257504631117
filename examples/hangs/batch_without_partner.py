"""batch_isend_irecv: rank 2 leaves its receive out of the batch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    sent, taken = torch.ones(8), torch.ones(8)
    ops = [dist.P2POp(dist.isend, sent, (rank + 1) % world)]  # <- here
    if not (rank == 2 and step == 8):
        ops.append(dist.P2POp(dist.irecv, taken, (rank - 1) % world))
    for work in dist.batch_isend_irecv(ops):  # <- here
        work.wait()
    dist.barrier()
