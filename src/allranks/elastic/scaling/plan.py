"""How one optimizer step's samples are dealt to ranks and micro-batches. Pure.

The gradient wanted is the mean over the global batch G. A rank's loss is a mean over its micro-batch of n
samples, and data parallelism averages over W ranks: with weight n * W / G on each micro-batch's loss the
result is exactly the mean over G, however uneven the sizes are.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class BatchPlan:
    """`micro[rank]` are the micro-batch sizes of one rank, all positive."""

    micro: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.micro)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return sum(self.shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per optimizer step of each rank."""
        return tuple(sum(sizes) for sizes in self.micro)

    @property
    def uniform(self) -> bool:
        """Whether all ranks have the same number of micro-batches (needed where a forward is collective)."""
        return len({len(sizes) for sizes in self.micro}) == 1

    def weight(self, rank: int, index: int) -> float:
        """What the mean loss of a micro-batch is multiplied with before backward."""
        return self.micro[rank][index] * self.world_size / self.global_batch


def exact_plan(global_batch: int, world_size: int, local_batch: int) -> BatchPlan:
    """Deals exactly `global_batch` samples, in micro-batches of at most `local_batch`, as evenly as possible.

    The number of micro-batches is the same for all ranks, except where a rank would be left with an empty one.
    """
    _check(global_batch, world_size, local_batch)
    shares = _even(global_batch, world_size)
    count = -(-max(shares) // local_batch)
    return BatchPlan(tuple(_even(share, min(count, share)) for share in shares))


def rounded_plan(accumulation_steps: int, world_size: int, local_batch: int) -> BatchPlan:
    """Every rank has `accumulation_steps` full micro-batches: the global batch is what comes out."""
    _check(1, 1, local_batch)
    return BatchPlan(((local_batch,) * accumulation_steps,) * world_size)


def _even(total: int, parts: int) -> tuple[int, ...]:
    whole, rest = divmod(total, parts)
    return tuple(whole + (i < rest) for i in range(parts))


def _check(global_batch: int, world_size: int, local_batch: int) -> None:
    if world_size < 1 or local_batch < 1:
        raise ConfigurationError(
            f"world size ({world_size}) and local batch ({local_batch}) must be positive"
        )
    if global_batch < world_size:
        raise ConfigurationError(
            f"target_global_batch_size ({global_batch}) is smaller than the world size ({world_size}): "
            f"{world_size - global_batch} rank(s) would have no sample",
            "scaling.target_global_batch_size",
        )
