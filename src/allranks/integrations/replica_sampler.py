"""A sampler that gives every replica its own part of each epoch, and can jump to a position after healing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


def replica_number() -> tuple[int, int]:
    """(number of this replica, number of replicas), from the variables of `allranks run --replicas` or torchft's launchers."""
    number = os.environ.get("REPLICA_GROUP_ID") or os.environ.get("ALLRANKS_REPLICA", "0").rpartition("-")[2]
    return int(number) if number.isdigit() else 0, int(os.environ.get("NUM_REPLICA_GROUPS") or 1)


class ReplicaSampler(Sampler[int]):
    """An endless order of samples, determined by seed, epoch and replica; `seek` sets the next one.

    Parts are fixed: the part of an absent replica is not used until it is back. Every pass has the same length in every replica.
    `on_pass` is called before the first sample of a pass.
    """

    def __init__(
        self,
        length: int,
        replica: int,
        replicas: int,
        seed: int,
        shuffle: bool = True,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.length, self.replica, self.replicas = length, replica % replicas, replicas
        self.seed, self.shuffle, self.on_pass = seed, shuffle, on_pass
        self.epoch = self.place = 0  # of the next sample
        self.drawn = 0  # samples since the pass began
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return -(-self.length // self.replicas)

    def __iter__(self) -> Iterator[int]:
        self.drawn = 0
        self.on_pass()
        for _ in range(len(self)):
            yield self._next()

    def seek(self, epoch: int, place: int) -> None:
        """Continues with the `place`-th sample of this replica's part of an epoch, also within a pass."""
        self.epoch, self.place = epoch + place // len(self), place % len(self)

    def set_epoch(self, epoch: int) -> None:
        """Ignored: the sampler counts epochs itself."""

    def _next(self) -> int:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self._part(self.epoch))
        index = self._order[1][self.place]
        self.seek(self.epoch, self.place + 1)
        self.drawn += 1
        return index

    def _part(self, epoch: int) -> list[int]:
        order = (
            torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            if self.shuffle
            else list(range(self.length))
        )
        whole = len(self) * self.replicas
        order = (order * -(-whole // max(1, len(order))))[:whole]  # repeats the first samples
        return order[self.replica :: self.replicas]
