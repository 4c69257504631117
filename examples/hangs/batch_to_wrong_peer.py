"""batch_isend_irecv around a ring: in one step rank 1 sends to the previous rank instead of the next."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(12):
    sent, taken = torch.ones(8), torch.ones(8)
    to = (rank - 1) % world if rank == 1 and step == 8 else (rank + 1) % world
    ops = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, taken, (rank - 1) % world)]  # <- here
    for work in dist.batch_isend_irecv(ops):  # <- here
        work.wait()
    dist.barrier()
