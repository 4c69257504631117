"""One state of one rank in shared memory: where it came from, who still needs it, and how it gets back.

A `Snapshot` is held by the memory tier and by saves under way. When the last holder lets go, its arena goes back
to the `ArenaPool`, to be used again: there is no allocation per save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.checkpoint.checksum import best_algorithm, checksum
from allranks.checkpoint.save.arena import Arena
from allranks.checkpoint.save.plan import Plan
from allranks.checkpoint.save.staging import Stager
from allranks.checkpoint.state import PER_RANK, CheckpointState, is_dtensor
from allranks.checkpoint.tensors import Flat, flatten, unflatten
from allranks.errors import CheckpointDamaged

#: Hashing a snapshot is a matter of memory bandwidth; whoever needs it waits no longer than this.
SEAL_LIMIT_S = 600.0


@dataclass(frozen=True)
class FlatState:
    """A state taken apart: what all ranks share, what is this rank's own, and all tensors by name."""

    common: Any
    own: Any
    tensors: dict[str, torch.Tensor]


def flatten_state(state: CheckpointState, rank: int) -> FlatState:
    """Takes a state apart; per-rank fields get names of their own, so that no rank's are taken for another's."""
    fields = state.to_dict()
    own = {name: fields.pop(name) for name in PER_RANK}
    common: Flat = flatten(fields)
    private: Flat = flatten(own, prefix=f"rank{rank:05d}")
    return FlatState(common.skeleton, private.skeleton, {**common.tensors, **private.tensors})


def unflatten_state(common: Any, own: Any, tensors: Mapping[str, torch.Tensor]) -> CheckpointState:
    """Puts a state together again; `own` None leaves the per-rank fields empty."""
    fields = unflatten(common, tensors)
    if own is not None:
        fields.update(unflatten(own, tensors))
    return CheckpointState.from_dict(fields)


class ArenaPool:
    """Arenas that nobody uses at the moment, and the stagers made for them."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._lock = threading.Lock()
        self._stagers: dict[tuple[int, int], Stager] = {}

    def take(self, length: int) -> Arena:
        """The smallest free arena that is large enough, or a new one in place of one that is not."""
        with self._lock:
            fitting = sorted((a for a in self._free if a.bytes >= length), key=lambda a: a.bytes)
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
            if self._free:
                self._drop(self._free.pop())
        return Arena(length)

    def give(self, arena: Arena) -> None:
        """Takes an arena back."""
        with self._lock:
            self._free.append(arena)

    def stager(self, arena: Arena, plan: Plan) -> Stager:
        """The stager for an arena and a plan; an arena keeps one, since its header belongs to one plan."""
        key = (arena.id, plan.id)
        with self._lock:
            if key not in self._stagers:
                for old in [k for k in self._stagers if k[0] == arena.id]:
                    del self._stagers[old]
                self._stagers[key] = Stager(arena, plan)
            return self._stagers[key]

    def close(self) -> None:
        """Frees what is not in use."""
        with self._lock:
            while self._free:
                self._drop(self._free.pop())

    def _drop(self, arena: Arena) -> None:
        for key in [k for k in self._stagers if k[0] == arena.id]:
            del self._stagers[key]
        arena.close()


@dataclass
class Snapshot:
    """A copied state. `ready` once its bytes are complete; `wraps` rebuilds DTensors around local chunks."""

    step: int
    timestamp: float
    common: Any
    own: Any
    plan: Plan
    arena: Arena
    pool: ArenaPool
    wraps: dict[str, Any]
    ready: bool = False
    _sums: dict[tuple[str, int], str] = field(default_factory=dict)
    _sealing: threading.Thread | None = None
    _forgotten: bool = False
    _holders: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """The shared memory it occupies."""
        return self.plan.arena_bytes

    @property
    def holders(self) -> int:
        """How many still need it."""
        return self._holders

    def hold(self) -> None:
        """One more needs the bytes."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """One needs them no longer; after the last one the arena may be overwritten."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.pool.give(self.arena)

    def seal(self) -> None:
        """Begins to hash the copied bytes, in a thread: `check` can tell later whether they are still the same."""
        self.hold()
        self._sealing = threading.Thread(target=self._seal, name="allranks-checkpoint-seal", daemon=True)
        self._sealing.start()

    def settle(self) -> None:
        """Waits for the hashing; nobody reads the bytes behind its back afterwards."""
        if self._sealing is not None:
            self._sealing.join(SEAL_LIMIT_S)

    def forget(self) -> None:
        """Nobody will load it any more: hashing ends with the tensor it is at."""
        self._forgotten = True
        self.settle()

    def check(self) -> None:
        """Raises CheckpointDamaged unless every byte is what was copied. A snapshot without a seal passes."""
        self.settle()
        found = self._checksums(lambda: False) if self._sums else {}
        for key, value in found.items():
            if value != self._sums[key]:
                name = key[0]
                raise CheckpointDamaged(
                    f"{name} in the memory snapshot of step {self.step} does not match its checksum",
                    invalid_keys=(name,), tier="MEMORY", hint="something wrote into its memory, or the memory is bad",
                )  # fmt: skip

    def local_views(self) -> dict[str, list[torch.Tensor]]:
        """name → views of its local chunks inside the arena. Valid while the snapshot is held."""
        views: dict[str, list[torch.Tensor]] = {}
        for placement in sorted((*self.plan.owned, *self.plan.extra), key=lambda p: p.piece.ordinal):
            piece = placement.piece
            view = self.arena.tensor(placement.start, piece.dtype, piece.shard.sizes)
            views.setdefault(piece.shard.name, []).append(view)
        return views

    def to_state(self) -> CheckpointState:
        """The state again, copied out of the arena; DTensors are DTensors again."""
        tensors = {name: self._rebuild(name, chunks) for name, chunks in self.local_views().items()}
        tensors.update({name: wrap.clone() for name, wrap in self.wraps.items() if name not in tensors})
        return unflatten_state(self.common, self.own, tensors)

    def _seal(self) -> None:
        try:
            self._sums = self._checksums(lambda: self._forgotten)
        finally:
            self.release()

    def _checksums(self, stop: Callable[[], bool]) -> dict[tuple[str, int], str]:
        algorithm, view, sums = best_algorithm(), self.arena.view, {}
        for placed in (*self.plan.owned, *self.plan.extra):
            if stop():
                return {}
            end = placed.start + placed.piece.shard.bytes
            sums[placed.piece.key] = checksum(view[placed.start : end], algorithm)
        return sums

    def _rebuild(self, name: str, chunks: list[torch.Tensor]) -> torch.Tensor:
        wrap = self.wraps.get(name)
        if wrap is None:
            return chunks[0].clone()
        from torch.distributed.tensor import DTensor

        local: torch.Tensor = DTensor.from_local(
            chunks[0].clone(), wrap.device_mesh, wrap.placements, run_check=False,
            shape=wrap.shape, stride=wrap.stride(),
        )  # fmt: skip
        return local


@dataclass(frozen=True)
class _Wrap:
    """What is needed to make a DTensor of a local chunk again, without keeping the live tensor alive."""

    device_mesh: Any
    placements: Any
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def clone(self) -> torch.Tensor:
        """A DTensor whose local chunk is empty on this rank."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, _ = compute_local_shape_and_global_offset(self.shape, self.device_mesh, self.placements)
        empty: torch.Tensor = DTensor.from_local(
            torch.empty(sizes, dtype=self.dtype), self.device_mesh, self.placements, run_check=False,
            shape=self.shape, stride=self.strides,
        )  # fmt: skip
        return empty


def wraps_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What `Snapshot.wraps` needs of the live tensors."""
    return {
        name: _Wrap(t.device_mesh, t.placements, t.shape, tuple(t.stride()), t.dtype)
        for name, t in tensors.items()
        if is_dtensor(t)
    }
