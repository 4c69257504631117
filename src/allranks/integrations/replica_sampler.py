"""Which samples a replica takes: every replica its own part of each epoch, and a place to jump to after healing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


def replica_number() -> tuple[int, int]:
    """(which replica this is, how many there are), as `allranks run --replicas` and torchft's launchers say."""
    number = os.environ.get("REPLICA_GROUP_ID") or os.environ.get("ALLRANKS_REPLICA", "0").rpartition("-")[2]
    return int(number) if number.isdigit() else 0, int(os.environ.get("NUM_REPLICA_GROUPS") or 1)


class ReplicaSampler(Sampler[int]):
    """An endless order of samples, the same for the same seed, epoch and replica; `seek` moves the next one.

    Parts are fixed: a replica that is away takes its part of the epoch with it until it is back. Every pass has the
    same length in every replica. `on_pass` is called when a pass begins, before its first sample.
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
        self.drawn = 0  # samples given out since the pass began
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return -(-self.length // self.replicas)

    def __iter__(self) -> Iterator[int]:
        self.drawn = 0
        self.on_pass()
        for _ in range(len(self)):
            yield self._next()

    def seek(self, epoch: int, place: int) -> None:
        """The next sample is the `place`-th of our part of that epoch, also of a pass that has begun."""
        self.epoch, self.place = epoch + place // len(self), place % len(self)

    def set_epoch(self, epoch: int) -> None:
        """Loops count their own passes; ours is known already."""

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
        # the last ones are filled up from the front
        order = (order * -(-whole // max(1, len(order))))[:whole]
        return order[self.replica :: self.replicas]
