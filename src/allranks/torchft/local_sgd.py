"""torchft.local_sgd: replicas that train alone for some steps."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from allranks.manager.diloco import DiLoCo
from allranks.manager.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD", "extract_local_tensor"]


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, of the local shard for a DTensor; without a gradient."""
    local = t.to_local() if isinstance(t, DTensor) else t
    return local.detach().clone().requires_grad_(t.requires_grad)
