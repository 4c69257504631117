"""FSDP2: rank 1 skips a layer of a loop: all calls come from one line, and only their number differs."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, skip):
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)  # <- here
        return x


model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
for step in range(20):
    skip = 2 if rank == 1 and step == 5 else None
    model(torch.ones(2, 16), skip).sum().backward()
