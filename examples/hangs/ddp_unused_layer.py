"""DDP: rank 1 does not use a layer in one step, so its gradients are never reduced and it fails in the next forward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, short):
        return self.first(x) if short else self.second(self.first(x))


model = DistributedDataParallel(Model())
for step in range(20):
    short = rank == 1 and step == 5
    model(torch.ones(2, 8), short).sum().backward()  # <- here
