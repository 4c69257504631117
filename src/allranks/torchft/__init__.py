"""For scripts written for torchft: `import allranks.torchft as torchft`. Needs torch.

torchft's public names under torchft's modules (`from allranks.torchft.local_sgd import DiLoCo`). Arguments without an
equivalent are accepted and ignored; names without one raise an error that says what to use instead.
"""

# ruff: noqa: E402
from __future__ import annotations

from allranks.errors import require

require("torch", feature="allranks.torchft", extra="torch")

from allranks.manager.ddp import DistributedDataParallel, replicate
from allranks.manager.diloco import DiLoCo, LocalSGD
from allranks.manager.optimizer import Optimizer, OptimizerWrapper
from allranks.torchft import checkpointing, coordination, manager, process_group
from allranks.torchft.manager import Manager, WorldSizeMode
from allranks.torchft.process_group import (
    ManagedProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
)
from allranks.torchft.small_modules import DistributedSampler, make_modules

globals().update(make_modules(__name__))

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "LocalSGD",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
    "WorldSizeMode",
    "checkpointing",
    "coordination",
    "manager",
    "process_group",
    "replicate",
]
