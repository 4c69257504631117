"""FSDP2: only rank 0 asks for the full state dict, to save it."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = torch.nn.Sequential(*[torch.nn.Linear(12, 12) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
for step in range(20):
    model(torch.ones(2, 12)).sum().backward()
    if rank == 0 and step == 5:
        get_model_state_dict(model, options=whole)  # <- here
