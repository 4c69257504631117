"""Snapshots of one rank's state in shared memory: the copy into them, their lifetime, and the copy back.

A `SharedArena` is allocated once and reused for every save. It is a memfd, so it has no name and lives as long as a process
holds it. With CUDA it is registered with the driver, so that a copy from the device is a plain DMA.

Tensors that only the optimizer changes (its parameters and state) are copied in the background during the next forward and
backward pass; the optimizer's next step calls `Copy.wait` first. All other tensors (a forward pass changes buffers such as
running means) are copied before `start` returns. If the version counter of a tensor changes meanwhile, the copy is discarded.

The memory tier and running saves hold a `StateSnapshot`. When the last one releases it, its arena returns to the
`ArenaPool`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.checkpoint.checksum import best_algorithm, checksum, in_threads
from allranks.checkpoint.manifest import padded
from allranks.checkpoint.save.plan import Placement, Plan, local_tensors
from allranks.checkpoint.state import PER_RANK, CheckpointState, StateDict
from allranks.checkpoint.tensors import Flat, as_dtensor, flatten, is_dtensor, local_chunk, unflatten
from allranks.errors import CheckpointDamaged

SEAL_LIMIT_S = 600.0  # limit for hashing a snapshot
_ids = itertools.count(1)


class SharedArena:
    """A block of shared memory. `view` is its bytes; `fd` is what the helper maps."""

    def __init__(self, length: int) -> None:
        self.id = next(_ids)
        self.bytes = max(padded(length), mmap.PAGESIZE)
        self.fd = os.memfd_create(f"allranks-checkpoint-{self.id}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.bytes)
        self._map = mmap.mmap(self.fd, self.bytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.pinned = _pin(self.address, self.bytes)
        self._closer = weakref.finalize(self, _close, self.fd, self.address if self.pinned else 0)
        self._stager: Stager | None = None

    def tensor(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor over a part of the block. It keeps the mapping alive, but not the arena."""
        count = math.prod(sizes)
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(sizes)

    def stager(self, plan: Plan) -> Stager:
        """The Stager for a plan; only the last one is kept, because the block holds the header of one plan."""
        if self._stager is None or self._stager.plan is not plan:
            self._stager = Stager(self, plan)
        return self._stager

    def close(self) -> None:
        """Frees the memory once no tensor over it is left."""
        self._stager = None
        self._closer()


def _close(fd: int, pinned_address: int) -> None:
    if pinned_address:
        torch.cuda.cudart().cudaHostUnregister(pinned_address)
    os.close(fd)


def _pin(address: int, length: int) -> bool:
    """Registers the memory for DMA; False without CUDA, or if the driver refuses."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(int(torch.cuda.cudart().cudaHostRegister(address, length, 0)) == 0)


_Pair = tuple[torch.Tensor, torch.Tensor]  # source, destination
_SPLIT_BYTES = 8 << 20  # a synchronous copy of this size uses two threads


class TornCopy(Exception):
    """A tensor changed during the copy, and not by the step of an attached optimizer."""


@dataclass
class Copy:
    """A running copy."""

    error: BaseException | None = None
    _left: list[_Pair] = field(default_factory=list)  # not copied yet, in reverse order
    _helping: threading.Lock = field(default_factory=threading.Lock)
    _host_done: threading.Event = field(default_factory=threading.Event)
    _events: list[tuple[int, torch.cuda.Event]] = field(default_factory=list)  # (device index, event)
    _thread: threading.Thread | None = None

    def wait(self) -> None:
        """Waits until the sources may change, and helps the copy thread. With CUDA, the device waits, not the caller."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        with self._helping:
            self._copy_left()
        self._host_done.wait()

    def _copy_left(self) -> None:
        """Copies the remaining pairs; stores an exception in `error`."""
        try:
            while self.error is None:
                _copy_one(*self._left.pop())
        except IndexError:
            return
        except BaseException as error:
            self.error = error

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the bytes are in the arena and `after` has run; False on timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True


class Stager:
    """Copies states into one arena by one plan; the destination tensors are created once."""

    def __init__(self, arena: SharedArena, plan: Plan) -> None:
        self.plan = plan
        header = plan.layout.header
        arena.view[: len(header)] = header
        self._targets = [
            arena.tensor(one.start, one.piece.dtype, one.piece.shard.sizes)
            for one in (*plan.owned, *plan.extra)
        ]
        self._streams: dict[int, torch.cuda.Stream] = {}

    def start(
        self,
        sources: Sequence[torch.Tensor],
        may_wait: Callable[[torch.Tensor], bool],
        after: Callable[[BaseException | None], None],
        background: bool,
    ) -> Copy:
        """Starts a copy. `may_wait(source)`: only an attached optimizer changes the source. `after(error)` runs at the end,
        in the background thread, or in this thread if nothing is left for the background."""
        pairs = list(zip(sources, self._targets, strict=True))
        copy = Copy()
        later = [pair for pair in pairs if background and may_wait(pair[0])]
        late = {id(source) for source, _ in later}
        now = [pair for pair in pairs if id(pair[0]) not in late]
        try:
            self._copy_device(copy, pairs, late)
            _copy_host([pair for pair in now if pair[0].device.type == "cpu"])
        except Exception as error:  # the save fails; training must not wait for it
            copy.error = error
            copy._host_done.set()
            after(error)
            return copy
        later = [pair for pair in later if pair[0].device.type == "cpu"]
        if not later and not copy._events:
            copy._host_done.set()
            after(None)
            return copy
        copy._left = later[::-1]
        versions = [(source, source._version) for source, _ in later]
        copy._thread = threading.Thread(
            target=_finish, args=(copy, versions, pairs, after), name="allranks-checkpoint-copy", daemon=True
        )
        copy._thread.start()
        if not background:
            copy._thread.join()
        return copy

    def _copy_device(self, copy: Copy, pairs: Sequence[_Pair], late: set[int]) -> None:
        """Queues device copies: those in `late` on a side stream, the others on the current stream."""
        devices = {source.device.index for source, _ in pairs if source.device.type == "cuda"}
        for index in devices:
            mine = [pair for pair in pairs if pair[0].device.type == "cuda" and pair[0].device.index == index]
            current = torch.cuda.current_stream(index)
            side = self._streams.setdefault(index, torch.cuda.Stream(device=index))
            for source, target in [pair for pair in mine if id(pair[0]) not in late]:
                target.copy_(source, non_blocking=True)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for source, target in [pair for pair in mine if id(pair[0]) in late]:
                    target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
            copy._events.append((index, event))


def _finish(
    copy: Copy,
    versions: Sequence[tuple[torch.Tensor, int]],
    pairs: Sequence[_Pair],
    after: Callable[[BaseException | None], None],
) -> None:
    """Body of the copy thread. `pairs` keeps device tensors alive until they are copied."""
    copy._copy_left()
    try:
        with copy._helping:  # waits for a helping thread
            changed = [source for source, version in versions if source._version != version]
        if changed:
            raise TornCopy(
                f"a tensor of shape {tuple(changed[0].shape)} changed during the copy, and not by the step of an "
                "attached optimizer: attach every optimizer, or set overlap_copy=False"
            )
        copy._host_done.set()
        for _, event in copy._events:
            event.synchronize()
    except BaseException as error:
        copy.error = copy.error or error
    copy._host_done.set()
    after(copy.error)


def _copy_host(pairs: Sequence[_Pair]) -> None:
    """Copies synchronously, with a second thread for large sizes."""
    threads = 2 if sum(source.nbytes for source, _ in pairs) >= _SPLIT_BYTES else 1
    largest_first = sorted(pairs, key=lambda pair: -pair[0].nbytes)
    in_threads(threads, largest_first, lambda pair: _copy_one(*pair))


def _copy_one(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies one tensor; memmove for plain memory releases the GIL and does not start torch's threads."""
    plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
    if plain and source.dtype == target.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


@dataclass(frozen=True)
class FlatState:
    """A split state: the skeleton shared by all ranks, this rank's own skeleton, and all tensors by name."""

    common: StateDict
    own: StateDict
    tensors: dict[str, torch.Tensor]


def flatten_state(state: CheckpointState, rank: int) -> FlatState:
    """Splits a state. The tensors of per-rank fields are named by rank."""
    for name, number in (("step", state.step), ("epoch", state.epoch)):
        if number < 0:
            raise ValueError(f"{name} is {number}, but must be at least 0")
    fields = state.to_dict()
    own = {name: fields.pop(name) for name in PER_RANK}
    common: Flat = flatten(fields)
    private: Flat = flatten(own, prefix=f"rank{rank:05d}")
    return FlatState(common.skeleton, private.skeleton, {**common.tensors, **private.tensors})


class ArenaPool:
    """Arenas that are currently unused."""

    def __init__(self) -> None:
        self._free: list[SharedArena] = []
        self._lock = threading.Lock()

    def take(self, length: int) -> SharedArena:
        """The smallest free arena that is large enough, else a new one, which replaces a smaller free one."""
        with self._lock:
            fitting = sorted((a for a in self._free if a.bytes >= length), key=lambda a: a.bytes)
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
            if self._free:
                self._free.pop().close()
        return SharedArena(length)

    def give(self, arena: SharedArena) -> None:
        with self._lock:
            self._free.append(arena)

    def close(self) -> None:
        """Frees the unused arenas."""
        with self._lock:
            while self._free:
                self._free.pop().close()


@dataclass
class StateSnapshot:
    """A copied state, `ready` once its bytes are complete. `wraps` rebuilds DTensors from local chunks."""

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
    holders: int = 0  # reference count
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def begin(cls, state: CheckpointState, flat: FlatState, plan: Plan, pool: ArenaPool) -> StateSnapshot:
        """An empty snapshot in an arena of the pool."""
        arena = pool.take(plan.arena_bytes)
        wraps = {
            name: _Wrap(t.device_mesh, t.placements, t.shape, tuple(t.stride()), t.dtype)
            for name, t in flat.tensors.items()
            if is_dtensor(t)
        }
        return cls(state.step, state.timestamp, flat.common, flat.own, plan, arena, pool, wraps)

    @classmethod
    def copied(cls, state: CheckpointState, flat: FlatState, plan: Plan, pool: ArenaPool) -> StateSnapshot:
        """A snapshot copied synchronously."""
        snapshot = cls.begin(state, flat, plan, pool)
        sources = [source for source, _ in local_tensors(flat.tensors, plan)]
        snapshot.arena.stager(plan).start(sources, lambda _: False, lambda _: None, background=False)
        snapshot.ready = True
        return snapshot

    @property
    def bytes(self) -> int:
        return self.plan.arena_bytes

    def hold(self) -> None:
        with self._lock:
            self.holders += 1

    def release(self) -> None:
        """Releases one hold; after the last one the arena may be overwritten."""
        with self._lock:
            self.holders -= 1
            last = self.holders == 0
        if last:
            self.pool.give(self.arena)

    def seal(self) -> None:
        """Starts a thread that hashes the copied bytes, for a later `check`."""
        self.hold()

        def hash_all() -> None:
            try:
                self._sums = self._checksums(lambda: self._forgotten)
            finally:
                self.release()

        self._sealing = threading.Thread(target=hash_all, name="allranks-checkpoint-seal", daemon=True)
        self._sealing.start()

    def settle(self) -> None:
        """Waits for the hashing thread."""
        if self._sealing is not None:
            self._sealing.join(SEAL_LIMIT_S)

    def forget(self) -> None:
        """Stops the hashing after the current tensor: the snapshot will not be loaded any more."""
        self._forgotten = True
        self.settle()

    def check(self) -> None:
        """Raises CheckpointDamaged if a byte has changed since the copy. A snapshot without checksums passes."""
        self.settle()
        found = self._checksums(lambda: False) if self._sums else {}
        for (name, ordinal), value in found.items():
            if value != self._sums[name, ordinal]:
                raise CheckpointDamaged(
                    f"{name} in the memory snapshot of step {self.step} does not match its checksum",
                    invalid_keys=(name,),
                    tier="MEMORY",
                    hint="another part of the program wrote into its memory, or the memory is faulty",
                )

    def local_views(self) -> dict[str, list[torch.Tensor]]:
        """name → views of its local chunks inside the arena. Valid while the snapshot is held."""
        views: dict[str, list[torch.Tensor]] = {}
        for placement in self._local():
            piece = placement.piece
            view = self.arena.tensor(placement.start, piece.dtype, piece.shard.sizes)
            views.setdefault(piece.shard.name, []).append(view)
        return views

    def local_offsets(self) -> dict[str, list[tuple[int, ...]]]:
        """name → offsets of each of these views in the whole tensor."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for placement in self._local():
            found.setdefault(placement.piece.shard.name, []).append(placement.piece.shard.offsets)
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """name → shape of the whole tensor, for the tensors that this rank has a part of."""
        return {placement.piece.shard.name: placement.piece.shard.shape for placement in self._local()}

    def _local(self) -> list[Placement]:
        return sorted((*self.plan.owned, *self.plan.extra), key=lambda p: p.piece.ordinal)

    def to_state(self) -> CheckpointState:
        """Copies the state out of the arena and rebuilds DTensors."""
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
    """The layout of a DTensor, without a reference to the live tensor."""

    device_mesh: Any
    placements: Any
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def clone(self) -> torch.Tensor:
        """A DTensor whose local chunk on this rank is empty."""
        return as_dtensor(torch.empty(local_chunk(self)[0], dtype=self.dtype), self)
