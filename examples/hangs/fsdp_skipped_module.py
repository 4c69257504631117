"""FSDP2: rank 1 skips a module of the model, by a condition on its own data."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, short):
        x = self.a(x)
        if not short:
            x = self.b(x)  # <- here
        x = self.c(x)
        return self.d(x)


model = Model()
for layer in (model.a, model.b, model.c, model.d):
    fully_shard(layer)
fully_shard(model)
for step in range(20):
    short = rank == 1 and step == 5
    model(torch.ones(2, 16), short).sum().backward()
