"""gather_object: rank 2 gathers on itself, the others on rank 0."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    dst = 2 if rank == 2 and step == 5 else 0
    dist.gather_object({"rank": rank}, [None] * world if rank == dst else None, dst)  # <- here
    dist.barrier()
