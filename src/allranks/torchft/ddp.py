"""torchft.ddp: data parallelism over replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.manager import Manager

__all__ = ["DistributedDataParallel", "PureDistributedDataParallel"]


class PureDistributedDataParallel(nn.Module):
    """One average per gradient, as soon as it is there. Slow; DistributedDataParallel sums up buckets."""

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        super().__init__()
        self.module = module

        def average(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                manager.allreduce(parameter.grad).wait()

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)
