"""A coalesced batch of gradients in which one of rank 1 has another size."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for step in range(12):
    tensors = [torch.ones(4), torch.ones(6 if rank == 1 and step == 8 else 8)]
    with dist._coalescing_manager():  # <- here
        for tensor in tensors:
            dist.all_reduce(tensor)
    dist.barrier()
