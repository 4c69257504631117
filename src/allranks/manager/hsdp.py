"""Sharded inside a replica (FSDP2), replicated across replicas by the manager: hybrid sharding that survives.

Runs in every rank of a replica. FSDP2 reduces and scatters gradients inside the replica; each shard is then
averaged with the same rank's shard of the other replicas. All ranks of all replicas vote together, so either
every shard of every replica moves, or none does.
"""

from __future__ import annotations

import torch
from torch import nn

from allranks.errors import ConfigurationError
from allranks.manager.manager import Manager


def replicate(manager: Manager, model: nn.Module) -> nn.Module:
    """Averages the shards' gradients of a `fully_shard`ed model over the replicas. Returns the model."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ConfigurationError(
            "replicate() needs a model sharded with FSDP2",
            hint="call torch.distributed.fsdp.fully_shard(model, mesh=...) first; "
            "for a model that is not sharded use DistributedDataParallel(manager, model)",
        )

    def average(shard: torch.Tensor) -> None:
        manager.allreduce(shard).wait()

    for module in sharded:
        module.set_all_reduce_hook(average)
    manager.sums.modules.append(model)
    return model
