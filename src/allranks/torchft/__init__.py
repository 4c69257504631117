"""For scripts written for torchft: `import allranks.torchft as torchft` and go on. Needs torch.

The names that mean the same, also under torchft's modules (`from allranks.torchft.local_sgd import DiLoCo`). What
is left out says why when it is asked for; docs/manager.md says more.
"""

from __future__ import annotations

from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.diloco import DiLoCo
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.groups.managed import (
    ManagedDeviceMesh,
    ManagedProcessGroup,
    ft_init_device_mesh,
    managed_device_mesh,
)
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.hsdp import replicate
from allranks.manager.local_sgd import LocalSGD
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer, OptimizerWrapper
from allranks.manager.options import WorldSizeMode
from allranks.manager.sampler import DistributedSampler

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "LocalSGD",
    "ManagedDeviceMesh",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "WorldSizeMode",
    "ft_init_device_mesh",
    "managed_device_mesh",
    "replicate",
]

_LEFT_OUT = {
    "ProcessGroupBabyNCCL": "groups are aborted in place, no child process is needed: use ProcessGroupNCCL",
    "ProcessGroupBabyGloo": "groups are aborted in place, no child process is needed: use ProcessGroupGloo",
    "ProcessGroupBabyXCCL": "there is no XCCL here: use ProcessGroupNCCL or ProcessGroupGloo",
    "ProcessGroupXCCL": "there is no XCCL here: use ProcessGroupNCCL or ProcessGroupGloo",
    "HTTPTransport": "healing is built in: leave checkpoint_transport away",
    "PGTransport": "healing is built in: leave checkpoint_transport away",
    "ParameterServer": "nothing here does its work",
}


def __getattr__(name: str) -> object:
    why = _LEFT_OUT.get(name)
    raise AttributeError(
        f"allranks.torchft leaves out {name}: {why}" if why else f"module 'allranks.torchft' has no {name!r}"
    )
