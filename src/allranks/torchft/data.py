"""torchft.data: the sampler over replicas."""

from __future__ import annotations

from allranks.manager.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
