"""The ranks that save and load together: who they are, and how they exchange small JSON. No pickle."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Group:
    """The given process group, or all ranks, or this process alone where there is no process group.

    Its collectives run on a gloo group of its own, made by all ranks together at the first `gather`.
    """

    def __init__(self, process_group: Any = None, timeout_s: float = 600.0) -> None:
        self._given = process_group
        self._timeout_s = timeout_s
        self._gloo: Any = None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.world_size == 1

    @property
    def rank(self) -> int:
        """This process's number within the group."""
        return dist.get_rank(self._given) if _initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self._given) if _initialized() else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. All ranks must call it."""
        if self.alone:
            return [json.loads(json.dumps(value))]
        group = self._channel()
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([body.numel()]), group=group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: body.numel()] = body
        bodies = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(bodies, padded, group=group)
        return [
            json.loads(bytes(data[: int(length)].numpy()))
            for data, length in zip(bodies, lengths, strict=True)
        ]

    def _channel(self) -> Any:
        if self._gloo is None:
            ranks = dist.get_process_group_ranks(self._given or dist.group.WORLD)
            self._gloo = dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=self._timeout_s),
                use_local_synchronization=True,
            )
        return self._gloo


def _initialized() -> bool:
    return bool(dist.is_available() and dist.is_initialized())
