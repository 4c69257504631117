"""The infinite global order of samples, and the positions in it that each step takes. Pure, random access, constant memory.

A shuffle of n samples is a Feistel network on the next power of two with cycle walking: a bijection that is computed instead
of stored, with its own key per epoch. A mixture assigns positions to its sources in blocks with fixed counts, so the weights
hold in every block and any position can be computed directly.

A step takes the next `sum(shares)` positions and assigns them to the ranks in order. The cursor only moves forward, whatever
the world size (`WorldHistory`), so no sample is lost or repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from allranks.errors import ConfigurationError

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_ROUNDS = 6
_PIECE = 1024  # positions of an order computed at a time
_BLOCK = 8192  # positions in which a mixture has its exact weights
_KEPT = 4  # pieces or blocks cached
_MASK = (1 << 64) - 1


def permuted(size: int, keys: list[int], which: Ids, positions: Ids) -> Ids:
    """Permutes each position in range(size) with its key `keys[which]`."""
    if size <= 1:
        return np.zeros(len(positions), dtype=np.int64)
    secrets = np.array([[mix(key, i) for key in keys] for i in range(_ROUNDS)], dtype=np.uint64)
    chosen = secrets[:, which]
    found = _rounds(size, chosen, positions.astype(np.uint64))
    outside = np.nonzero(found >= size)[0]
    while len(outside):  # less than half of the domain is outside: 2 steps on average
        walked = _rounds(size, chosen[:, outside], found[outside])
        found[outside] = walked
        outside = outside[walked >= size]
    return found.astype(np.int64)


def _rounds(size: int, secrets: Words, values: Words) -> Words:
    """One pass of an unbalanced Feistel network over the next power of two."""
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    shift = np.uint64(low_bits)
    low, high = values & low_mask, values >> shift
    for i in range(_ROUNDS):
        if i % 2:
            low = low ^ (_scramble(high ^ secrets[i]) & low_mask)
        else:
            high = high ^ (_scramble(low ^ secrets[i]) & high_mask)
    joined: Words = (high << shift) | low
    return joined


def _scramble(values: Words) -> Words:
    """A 64-bit mixing function on arrays."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0xD6E8FEB86659FD93)
        return values ^ (values >> np.uint64(32))


def mix(*numbers: int) -> int:
    """A 64-bit key from numbers, identical on every machine and in every version."""
    state = 0x243F6A8885A308D3
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 29)) * 0xD6E8FEB86659FD93) & _MASK
        state ^= state >> 32
    return state


@dataclass(frozen=True)
class Order:
    """One source: position p is sample `shuffle(p % n)` of epoch `p // n`."""

    size: int
    seed: int = 0
    shuffle: bool = True
    _kept: OrderedDict[int, Ids] = field(default_factory=OrderedDict, repr=False, compare=False)

    def epoch(self, position: int) -> int:
        """Number of full passes over the samples before this position."""
        return position // self.size

    def ids(self, start: int, count: int) -> Ids:
        return _from_blocks(
            self._kept, _PIECE, lambda number: self.at(np.arange(_PIECE) + number * _PIECE), start, count
        )

    def at(self, positions: Ids) -> Ids:
        """The samples at these positions."""
        inside = positions % self.size
        if not self.shuffle or not len(positions):
            return inside
        epochs = positions // self.size
        first, last = int(epochs.min()), int(epochs.max())
        keys = [mix(self.seed, epoch) for epoch in range(first, last + 1)]
        return permuted(self.size, keys, epochs - first, inside)


@dataclass(frozen=True)
class Mixture:
    """Several sources by weight; sample ids number the sources one after the other.

    Every block of 8192 positions contains source i exactly `counts[i]` times. A source that is exhausted starts its next
    epoch, with its own shuffle.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int = 0
    shuffle: bool = True
    _kept: OrderedDict[int, Ids] = field(default_factory=OrderedDict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights):
            raise ConfigurationError(
                f"{len(self.sizes)} sources but {len(self.weights)} weights", "data.weights"
            )
        if any(weight <= 0 for weight in self.weights):
            raise ConfigurationError(f"weights {list(self.weights)} must be positive", "data.weights")

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Positions of each source in a block."""
        return _shares(self.weights, _BLOCK)

    def epoch(self, position: int) -> int:
        """Full passes over the source with the most passes."""
        return max(self.passes(position))

    def passes(self, position: int) -> list[int]:
        """Full passes over each source before this position."""
        block, inside = divmod(position, _BLOCK)
        turns = self._turns(block)[:inside]
        return [
            (block * count + int((turns == i).sum())) // self.sizes[i] for i, count in enumerate(self.counts)
        ]

    def ids(self, start: int, count: int) -> Ids:
        return _from_blocks(self._kept, _BLOCK, self._block, start, count)

    def _turns(self, block: int) -> Ids:
        """The source of each position in a block."""
        dealt = np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)
        zeros = np.zeros(_BLOCK, dtype=np.int64)
        return dealt[permuted(_BLOCK, [mix(self.seed, -1, block)], zeros, np.arange(_BLOCK, dtype=np.int64))]

    def _block(self, number: int) -> Ids:
        turns = self._turns(number)
        found = np.empty(_BLOCK, dtype=np.int64)
        base = 0
        for i, count in enumerate(self.counts):
            here = turns == i
            order = Order(self.sizes[i], mix(self.seed, i), self.shuffle)
            found[here] = base + order.at(np.arange(number * count, (number + 1) * count, dtype=np.int64))
            base += self.sizes[i]
        return found


def _from_blocks(
    kept: OrderedDict[int, Ids], size: int, make: Callable[[int], Ids], start: int, count: int
) -> Ids:
    """Positions [start, start + count) from blocks, the last few of which are cached."""
    parts = [np.empty(0, dtype=np.int64)]
    while count > 0:
        number, inside = divmod(start, size)
        if number not in kept:
            kept[number] = make(number)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        part = kept[number][inside : inside + count]
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Splits `total` by weight with the largest-remainder method; every share is at least 1."""
    whole = sum(weights)
    exact = [weight / whole * total for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for turn in range(total - sum(shares)):
        shares[by_rest[turn % len(shares)]] += 1
    while sum(shares) > total:
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


@dataclass(frozen=True)
class Segment:
    """From `first_step` on, rank r takes `shares[r]` samples per step; `position` is the cursor at `first_step`."""

    first_step: int
    shares: tuple[int, ...]
    position: int

    @property
    def per_step(self) -> int:
        return sum(self.shares)


@dataclass(frozen=True)
class WorldHistory:
    """Segments ordered by first step; the first begins at step 0."""

    segments: tuple[Segment, ...] = ()

    def at(self, step: int) -> Segment:
        """The segment that a step belongs to."""
        found = bisect_right(self.segments, step, key=lambda segment: segment.first_step)
        return self.segments[max(0, found - 1)]

    def position(self, step: int) -> int:
        """The cursor before a step: samples taken by all earlier steps."""
        if not self.segments:
            return 0
        segment = self.at(step)
        return segment.position + (step - segment.first_step) * segment.per_step

    def change(self, step: int, shares: Sequence[int]) -> WorldHistory:
        """A new history with these shares from `step` on; later segments are dropped."""
        new = tuple(shares)
        before = tuple(segment for segment in self.segments if segment.first_step < step)
        if before and before[-1].shares == new:
            return WorldHistory(before)
        position = WorldHistory(before).position(step)
        return WorldHistory((*before, Segment(step, new, position)))

    def to_list(self) -> list[Any]:
        """Plain lists, with run-length encoded shares."""
        return [
            [segment.first_step, [[share, len(list(same))] for share, same in groupby(segment.shares)]]
            for segment in self.segments
        ]

    @staticmethod
    def from_list(rows: list[Any]) -> WorldHistory:
        """The inverse of `to_list`."""
        history = WorldHistory()
        for first_step, runs in rows:
            shares = [share for share, times in runs for _ in range(times)]
            history = history.change(first_step, shares)
        return history
