"""Data for one rank of one replica: every replica and every rank inside it takes its own part."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils import data


class DistributedSampler(data.distributed.DistributedSampler):
    """torch's sampler over replicas x ranks. As in torchft the parts are fixed: a replica that is away takes
    its samples with it until it is back. For data that follows the members use allranks.elastic."""

    def __init__(
        self,
        dataset: data.Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **options: Any,
    ) -> None:
        if group_rank is None:
            group_rank = dist.get_rank() if dist.is_initialized() else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if dist.is_initialized() else 1
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, rank=self.global_rank, num_replicas=self.global_world_size, **options)
