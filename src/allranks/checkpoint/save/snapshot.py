"""One state of one rank in shared memory: where it came from, who still needs it, and how it gets back.

A `StateSnapshot` is held by the memory tier and by saves under way. When the last holder lets go, its arena goes back
to the `ArenaPool`, to be used again: there is no allocation per save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.checkpoint.checksum import best_algorithm, checksum
from allranks.checkpoint.save.plan import Plan, local_tensors
from allranks.checkpoint.save.staging import SharedArena, Stager
from allranks.checkpoint.state import PER_RANK, CheckpointState, StateDict
from allranks.checkpoint.tensors import Flat, as_dtensor, flatten, is_dtensor, local_chunk, unflatten
from allranks.errors import CheckpointDamaged

#: Hashing a snapshot is a matter of memory bandwidth; nothing waits longer than this for it.
SEAL_LIMIT_S = 600.0


@dataclass(frozen=True)
class FlatState:
    """A state taken apart: what all ranks share, what is this rank's own, and all tensors by name."""

    common: StateDict
    own: StateDict
    tensors: dict[str, torch.Tensor]


def flatten_state(state: CheckpointState, rank: int) -> FlatState:
    """Takes a state apart; per-rank fields get names of their own, so that no rank's are taken for another's."""
    fields = state.to_dict()
    own = {name: fields.pop(name) for name in PER_RANK}
    common: Flat = flatten(fields)
    private: Flat = flatten(own, prefix=f"rank{rank:05d}")
    return FlatState(common.skeleton, private.skeleton, {**common.tensors, **private.tensors})


class ArenaPool:
    """Arenas that nobody uses at the moment, and the stagers made for them."""

    def __init__(self) -> None:
        self._free: list[SharedArena] = []
        self._lock = threading.Lock()
        self._stagers: dict[int, Stager] = {}  # by the arena's id

    def take(self, length: int) -> SharedArena:
        """The smallest free arena that is large enough, or a new one in place of one that is not."""
        with self._lock:
            fitting = sorted((a for a in self._free if a.bytes >= length), key=lambda a: a.bytes)
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
            if self._free:
                self._drop(self._free.pop())
        return SharedArena(length)

    def give(self, arena: SharedArena) -> None:
        with self._lock:
            self._free.append(arena)

    def stager(self, arena: SharedArena, plan: Plan) -> Stager:
        """The stager for an arena and a plan; an arena keeps one, since its header belongs to one plan."""
        with self._lock:
            known = self._stagers.get(arena.id)
            if known is None or known.plan is not plan:
                known = self._stagers[arena.id] = Stager(arena, plan)
            return known

    def close(self) -> None:
        """Frees what is not in use."""
        with self._lock:
            while self._free:
                self._drop(self._free.pop())

    def _drop(self, arena: SharedArena) -> None:
        self._stagers.pop(arena.id, None)
        arena.close()


@dataclass
class StateSnapshot:
    """A copied state. `ready` once its bytes are complete; `wraps` rebuilds DTensors around local chunks."""

    step: int
    timestamp: float
    common: StateDict
    own: StateDict
    plan: Plan
    arena: SharedArena
    pool: ArenaPool
    wraps: dict[str, _Wrap]
    ready: bool = False
    _sums: dict[tuple[str, int], str] = field(default_factory=dict)
    _sealing: threading.Thread | None = None
    _forgotten: bool = False
    holders: int = 0  # how many still need it
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def begin(cls, state: CheckpointState, flat: FlatState, plan: Plan, pool: ArenaPool) -> StateSnapshot:
        """An empty snapshot in memory of the pool, to be filled by the pool's stager."""
        arena = pool.take(plan.arena_bytes)
        wraps = {
            name: _Wrap(t.device_mesh, t.placements, t.shape, tuple(t.stride()), t.dtype)
            for name, t in flat.tensors.items()
            if is_dtensor(t)
        }
        return cls(state.step, state.timestamp, flat.common, flat.own, plan, arena, pool, wraps)

    @classmethod
    def copied(cls, state: CheckpointState, flat: FlatState, plan: Plan, pool: ArenaPool) -> StateSnapshot:
        """A state copied here and now."""
        snapshot = cls.begin(state, flat, plan, pool)
        sources = [source for source, _ in local_tensors(flat.tensors, plan)]
        pool.stager(snapshot.arena, plan).start(sources, lambda _: False, lambda _: None, background=False)
        snapshot.ready = True
        return snapshot

    @property
    def bytes(self) -> int:
        return self.plan.arena_bytes

    def hold(self) -> None:
        with self._lock:
            self.holders += 1

    def release(self) -> None:
        """One needs them no longer; after the last one the arena may be overwritten."""
        with self._lock:
            self.holders -= 1
            last = self.holders == 0
        if last:
            self.pool.give(self.arena)

    def seal(self) -> None:
        """Begins to hash the copied bytes, in a thread: `check` can tell later whether they are still the same."""
        self.hold()

        def hash_all() -> None:
            try:
                self._sums = self._checksums(lambda: self._forgotten)
            finally:
                self.release()

        self._sealing = threading.Thread(target=hash_all, name="allranks-checkpoint-seal", daemon=True)
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
        for (name, ordinal), value in found.items():
            if value != self._sums[name, ordinal]:
                raise CheckpointDamaged(
                    f"{name} in the memory snapshot of step {self.step} does not match its checksum",
                    invalid_keys=(name,),
                    tier="MEMORY",
                    hint="something wrote into its memory, or the memory is bad",
                )

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
        tensors = {name: chunks[0].clone() for name, chunks in self.local_views().items()}
        for name, wrap in self.wraps.items():
            tensors[name] = as_dtensor(tensors[name], wrap) if name in tensors else wrap.clone()
        fields = {**unflatten(self.common, tensors), **unflatten(self.own, tensors)}
        return CheckpointState.from_dict(fields)

    def _checksums(self, stop: Callable[[], bool]) -> dict[tuple[str, int], str]:
        algorithm, view, sums = best_algorithm(), self.arena.view, {}
        for placed in (*self.plan.owned, *self.plan.extra):
            if stop():
                return {}
            end = placed.start + placed.piece.shard.bytes
            sums[placed.piece.key] = checksum(view[placed.start : end], algorithm)
        return sums


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
        return as_dtensor(torch.empty(local_chunk(self)[0], dtype=self.dtype), self)
