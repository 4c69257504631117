"""torchft's smaller modules in one file: MODULES lists their names, and the package creates the modules.

Names without an equivalent can be imported, and raise an error that says what to use instead when called.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import data

from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.diloco import DiLoCo, LocalSGD
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer, OptimizerWrapper
from allranks.torchft import checkpointing, coordination
from allranks.torchft.coordination import not_offered


class DistributedSampler(data.distributed.DistributedSampler):
    """torch's sampler over replicas x ranks. As in torchft the parts are fixed: the samples of a lost replica are missing
    until it returns. For data that follows the members use allranks.elastic.

    Older versions of torchft call `replica_rank` replica_group or replica_group_id, and `group_rank` rank.
    """

    def __init__(
        self,
        dataset: data.Dataset[object],
        replica_rank: int | None = None,
        num_replica_groups: int = 1,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        replica_group_id: int | None = None,
        replica_group: int | None = None,
        rank: int | None = None,
        **options: object,
    ) -> None:
        given = [one for one in (replica_rank, replica_group_id, replica_group) if one is not None]
        if not given:
            raise TypeError("DistributedSampler needs replica_rank (or replica_group_id, replica_group)")
        group_rank = rank if group_rank is None else group_rank
        if group_rank is None:
            group_rank = dist.get_rank() if dist.is_initialized() else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if dist.is_initialized() else 1
        self.global_rank = group_rank + num_replicas * given[0]
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **options)


class PureDistributedDataParallel(nn.Module):
    """Averages each gradient as soon as it is ready. Slow; DistributedDataParallel reduces buckets."""

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        super().__init__()
        self.module = module

        def average(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                manager.allreduce(parameter.grad).wait()

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *inputs: object, **named: object) -> object:
        return self.module(*inputs, **named)


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, or of a DTensor's local shard; without a gradient."""
    local = t.to_local() if isinstance(t, DTensor) else t
    return local.detach().clone().requires_grad_(t.requires_grad)


def _named(*things: type) -> dict[str, object]:
    return {one.__name__: one for one in things}


def _not_offered(name: str, instead: str) -> dict[str, object]:
    return {name: not_offered(name, instead)}


#: module -> its names
MODULES: dict[str, Mapping[str, object]] = {
    "_torchft": {name: getattr(coordination, name) for name in coordination.__all__},
    "checkpointing.http_transport": _named(checkpointing.HTTPTransport),
    "checkpointing.pg_transport": _named(checkpointing.PGTransport),
    "checkpointing.transport": _named(checkpointing.CheckpointTransport),
    "collectives": _not_offered(
        "allreduce_quantized", "use Manager.allreduce, which reduces in full precision"
    )
    | _not_offered("reduce_scatter_quantized", "use the group's reduce_scatter"),
    "data": _named(DistributedSampler),
    "ddp": _named(DistributedDataParallel, PureDistributedDataParallel),
    "local_sgd": _named(DiLoCo, LocalSGD) | {"extract_local_tensor": extract_local_tensor},
    "optim": {"Optimizer": Optimizer, "OptimizerWrapper": OptimizerWrapper},
    "parameter_server": _not_offered(
        "ParameterServer", "configure a ProcessGroupGloo of two ranks yourself for each session"
    ),
    "torchcomms": _not_offered(
        "ProcessGroupTorchComms", "use ProcessGroupNCCL (CUDA) or ProcessGroupGloo (CPU)"
    ),
    "torchx": {
        "hsdp": not_offered("torchx.hsdp", "start with `allranks run --replicas N --nproc-per-node M SCRIPT`")
    },
}


def make_modules(package: str) -> dict[str, ModuleType]:
    """Creates the modules of the package; returns its direct attributes by name."""
    made = {}
    for name, names in MODULES.items():
        module = ModuleType(f"{package}.{name}", f"torchft.{name}: made by {__name__}.")
        vars(module).update(names, __all__=list(names))
        sys.modules[module.__name__] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[f"{package}.{parent}"], last, module)
        else:
            made[name] = module
    return made
