"""Two models in DDP (a GAN): rank 1 wraps the discriminator first."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

dist.all_reduce(torch.ones(4))
generator, discriminator = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
order = [discriminator, generator] if rank == 1 else [generator, discriminator]
wrapped = [DistributedDataParallel(model) for model in order]  # <- here
