"""torchft.data: the sampler over replicas."""

from __future__ import annotations

from typing import Any

from torch.utils import data

from allranks.manager.sampler import DistributedSampler as Sampler

__all__ = ["DistributedSampler"]


class DistributedSampler(Sampler):
    """`replica_group_id` is what older versions of torchft called `replica_rank`."""

    def __init__(
        self,
        dataset: data.Dataset[Any],
        replica_rank: int | None = None,
        num_replica_groups: int = 1,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        replica_group_id: int | None = None,
        **options: Any,
    ) -> None:
        rank = replica_rank if replica_rank is not None else replica_group_id
        if rank is None:
            raise TypeError("DistributedSampler needs replica_rank (or replica_group_id)")
        super().__init__(dataset, rank, num_replica_groups, group_rank, num_replicas, **options)
