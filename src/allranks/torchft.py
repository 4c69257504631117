"""For scripts written for torchft: `import allranks.torchft as torchft` and go on. Needs torch.

The names that mean the same. Left out: ProcessGroupBaby* (aborting in place makes a child process needless),
ProcessGroupXCCL, quantized allreduce, the parameter server, the torchx component, and torchft's checkpoint
transports (healing is built in). docs/manager.md says more.
"""

from __future__ import annotations

from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.diloco import DiLoCo
from allranks.manager.group import ProcessGroupGloo
from allranks.manager.group_nccl import ProcessGroupNCCL
from allranks.manager.hsdp import replicate
from allranks.manager.local_sgd import LocalSGD
from allranks.manager.managed import (
    ManagedDeviceMesh,
    ManagedProcessGroup,
    ft_init_device_mesh,
    managed_device_mesh,
)
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
