"""torchft.ddp: data parallelism over replicas."""

from __future__ import annotations

from allranks.manager.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
