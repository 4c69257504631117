"""broadcast_object_list: rank 1 takes itself for the source."""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

for step in range(8):
    src = 1 if rank == 1 and step == 5 else 0
    dist.broadcast_object_list([{"step": step}], src)  # <- here
    dist.barrier()
