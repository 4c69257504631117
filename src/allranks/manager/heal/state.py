"""A rank's live state for transfer: its tensors, and where their bytes are.

Bytes are read from, or received into, the training tensors. Copied are only tensors that may change meanwhile (buffers of
the wrapped modules, and all small tensors, which may be counters) and tensors without contiguous CPU bytes.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from allranks.channel.keys import ChannelError
from allranks.checkpoint.tensors import flatten, memory_of, unflatten
from allranks.manager.plan import Position

#: Tensors up to this size are copied when offered: a forward may change them (buffers, counters).
SMALL_BYTES = 64 << 10
STRIPE_BYTES = 4 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: asking a tensor for a missing attribute is slow


@dataclass(eq=False)
class Staging:
    """Host memory for bytes from or to a device: one per connection, reused for each stripe. Not thread-safe.

    Copies use their own stream, so that they do not wait for the forward and backward already launched by the training
    thread; `fetch` and `store` return when the copy is done. The next call overwrites the memory of `fetch` or `room`.
    """

    copying_s: float = 0.0  # spent in copies from or to a device
    moved_bytes: int = 0  # that its connection has sent or received
    _memory: torch.Tensor | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def fetch(self, source: torch.Tensor) -> memoryview:
        """The bytes of a flat uint8 tensor of a device."""
        host = self._host(source.numel())
        with self._on_side_stream(source.device):
            host.copy_(source, non_blocking=True)
        return memory_of(host)

    def room(self, length: int) -> memoryview:
        """Memory for bytes to be received, before they are checked and stored."""
        return memory_of(self._host(length))

    def store(self, offset: int, target: torch.Tensor) -> None:
        """Copies received bytes, from `offset` on, into a flat uint8 tensor of a device."""
        if self._memory is not None and target.numel():
            with self._on_side_stream(target.device):
                target.copy_(self._memory[offset : offset + target.numel()], non_blocking=True)

    def _host(self, length: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < length:
            self._memory = torch.empty(length, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._memory[:length]

    @contextlib.contextmanager
    def _on_side_stream(self, device: torch.device) -> Iterator[None]:
        began = time.monotonic()
        with side_stream(device, self._streams):
            yield
        self.copying_s += time.monotonic() - began


@contextlib.contextmanager
def side_stream(device: torch.device, streams: dict[torch.device, torch.cuda.Stream]) -> Iterator[None]:
    """Runs GPU work on a stream of `streams`, and waits for it at the end. Does nothing for a CPU."""
    if device.type != "cuda":
        yield
        return
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(streams[device]):
        yield
    streams[device].synchronize()


@dataclass(frozen=True)
class HealSegment:
    """A run of bytes of one tensor of the layout."""

    tensor: int
    offset: int
    length: int


@dataclass(frozen=True)
class LiveState:
    """Access to the state of a rank, from any thread, while it is stable."""

    read: Callable[[], object]
    moving: Callable[[], frozenset[int]] = frozenset  # addresses of tensors that a forward may change
    volatile: Callable[[], bool] = bool  # whether the whole state may change between commits

    def offer(self, position: Position) -> Offer:
        """An offer of the current state."""
        return make_offer(position, self.read(), self.volatile(), self.moving())

    def landing(self, layout: StateLayout, keep: bool = False) -> Landing:
        """Memory for a fetched state: our own tensors, except those that a forward may be changing.

        `keep`: new memory, so that our state stays complete until the other has arrived; our own if memory is short.
        """
        own, moving = flatten(self.read()).tensors, self.moving()
        apart = keep and has_room(_needs(layout, own))
        placed = [_place(note, own, moving, apart) for note in layout.notes]
        values = {note.name: value for note, (value, _) in zip(layout.notes, placed, strict=True)}
        return Landing(layout, values, tuple(local for _, local in placed), apart)


@dataclass(frozen=True)
class TensorNote:
    """One tensor of the layout. `whole` is the global shape of a DTensor, else empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    whole: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateLayout:
    """The layout of an offer: the skeleton (JSON) and its tensors, in order."""

    skeleton: object
    notes: tuple[TensorNote, ...]

    @property
    def total_bytes(self) -> int:
        return sum(note.nbytes for note in self.notes)

    def to_json(self) -> dict[str, object]:
        return {
            "skeleton": self.skeleton,
            "notes": [[n.name, n.dtype, list(n.shape), n.nbytes, list(n.whole)] for n in self.notes],
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> StateLayout:
        """From a JSON object; checks sizes against shapes before memory is allocated."""
        notes = []
        for name, dtype, shape, nbytes, whole in raw["notes"]:
            note = TensorNote(str(name), str(dtype), tuple(shape), int(nbytes), tuple(whole))
            size = torch.Size(note.shape).numel() * _dtype(note.dtype).itemsize
            if size != note.nbytes:
                raise ChannelError(f"{note.name}: {note.nbytes} bytes announced for a tensor of {size}")
            notes.append(note)
        return StateLayout(raw["skeleton"], tuple(notes))


@dataclass(frozen=True)
class Offer:
    """A state that may be fetched, until the rank commits its next step."""

    position: Position
    layout: StateLayout
    tensors: tuple[torch.Tensor, ...]

    def read(self, segments: Sequence[HealSegment], staging: Staging) -> Iterator[memoryview]:
        """The bytes of the segments, one after the other; each is valid until the next one."""
        for segment in segments:
            tensor = self.tensors[segment.tensor]
            end = segment.offset + segment.length
            if not 0 <= segment.offset <= end <= self.layout.notes[segment.tensor].nbytes:
                raise ChannelError(f"segment {segment} lies outside its tensor")
            if tensor.device.type == "cpu":
                yield memory_of(tensor)[segment.offset : end]
            else:
                yield staging.fetch(_bytes_of(tensor)[segment.offset : end])


def make_offer(
    position: Position, state: object, copy: bool = False, moving: frozenset[int] = frozenset()
) -> Offer:
    """An offer of a state. `copy` copies all of it, for a state that changes before the next commit."""
    flat = flatten(state)
    notes, tensors = [], []
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for name, tensor in flat.tensors.items():
        local = local_of(tensor)
        whole = tuple(tensor.shape) if local is not tensor else ()
        nbytes = local.numel() * local.element_size()
        # on a separate stream, not behind the forward and backward already launched
        if nbytes <= SMALL_BYTES:  # to the host: the allocator might reuse a copy on the device
            with side_stream(local.device, streams):
                local = local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        elif copy or not local.is_contiguous() or local.data_ptr() in moving:
            with side_stream(local.device, streams):
                local = local.detach().clone(memory_format=torch.contiguous_format)
        notes.append(
            TensorNote(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), nbytes, whole)
        )
        tensors.append(local.detach())
    return Offer(position, StateLayout(flat.skeleton, tuple(notes)), tuple(tensors))


@dataclass(frozen=True)
class Landing:
    """The memory of a fetched state: our own tensors where they fit, else new ones."""

    layout: StateLayout
    values: dict[str, torch.Tensor]  # for load_state_dict
    locals: tuple[torch.Tensor, ...]  # contiguous memory in layout order
    apart: bool = False  # none of it is our own

    def views(self, segments: Sequence[HealSegment], staging: Staging) -> list[memoryview]:
        """Writable memory: the tensors themselves on the CPU, staging memory for a device (see `settle`)."""
        room, used, found = self._room(segments, staging), 0, []
        for segment in segments:
            local = self.locals[segment.tensor]
            if local.device.type == "cpu":
                found.append(memory_of(local)[segment.offset : segment.offset + segment.length])
            else:
                found.append(room[used : used + segment.length])
                used += segment.length
        return found

    def settle(self, segments: Sequence[HealSegment], staging: Staging) -> None:
        """Copies checked bytes to their device. Nothing to do on the CPU."""
        used = 0
        for segment in segments:
            local = self.locals[segment.tensor]
            if local.device.type != "cpu":
                target = _bytes_of(local)[segment.offset : segment.offset + segment.length]
                staging.store(used, target)
                used += segment.length

    def _room(self, segments: Sequence[HealSegment], staging: Staging) -> memoryview:
        far = [part.length for part in segments if self.locals[part.tensor].device.type != "cpu"]
        return staging.room(sum(far)) if far else memoryview(b"")

    def state(self) -> object:
        """The fetched state, for load_state_dict."""
        return unflatten(self.layout.skeleton, self.values)


def stripes(layout: StateLayout, size: int = STRIPE_BYTES) -> list[tuple[HealSegment, ...]]:
    """Cuts a layout into stripes of `size` bytes; small tensors share one, large ones span several."""
    found: list[tuple[HealSegment, ...]] = []
    current: list[HealSegment] = []
    room = size
    for index, note in enumerate(layout.notes):
        offset = 0
        while offset < note.nbytes:
            length = min(room, note.nbytes - offset)
            current.append(HealSegment(index, offset, length))
            offset, room = offset + length, room - length
            if room == 0:
                found.append(tuple(current))
                current, room = [], size
    if current:
        found.append(tuple(current))
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; a plain tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def _place(
    note: TensorNote, own: Mapping[str, torch.Tensor], moving: frozenset[int], apart: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mine, device = own.get(note.name), None
    dtype = _dtype(note.dtype)
    if mine is not None:
        local = local_of(mine)
        fits = local.dtype == dtype and tuple(local.shape) == note.shape and local.is_contiguous()
        # a forward may be changing it: then load_state_dict copies it
        moves = local.data_ptr() in moving or (note.nbytes <= SMALL_BYTES and not note.whole)
        if not apart and fits and not moves and (local is not mine) == bool(note.whole):
            return mine, local.detach()
        device = local.device
    fresh = torch.empty(note.shape, dtype=dtype, device=device)
    return (_sharded_like(fresh, note, own) if note.whole else fresh), fresh


def _needs(layout: StateLayout, own: Mapping[str, torch.Tensor]) -> dict[torch.device, int]:
    """Bytes of a second copy, per device."""
    needs: dict[torch.device, int] = {}
    for note in layout.notes:
        device = local_of(own[note.name]).device if note.name in own else torch.device("cpu")
        needs[device] = needs.get(device, 0) + note.nbytes
    return needs


def _sharded_like(local: torch.Tensor, note: TensorNote, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Wraps a new local shard (optimizer state) like our own DTensor of the same shape."""
    for mine in own.values():
        shard = local_of(mine)
        if shard is not mine and tuple(mine.shape) == note.whole and shard.shape == local.shape:
            wrapped: torch.Tensor = type(mine).from_local(
                local.to(shard.device),
                mine.device_mesh,
                mine.placements,
                run_check=False,
                shape=mine.shape,
                stride=mine.stride(),
            )
            return wrapped
    raise ChannelError(f"{note.name} is sharded at the source, and nothing of ours is sharded like it")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # .data: autograd must not see an in-place change while a backward runs
    return tensor.data.reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ChannelError(f"unknown dtype {name!r}")
    return found


_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory for a copy


def has_room(needs: dict[torch.device, int]) -> bool:
    """Whether this many bytes are free on each device."""
    return all(size <= _SHARE * free_bytes(device) for device, size in needs.items())


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device, or of this machine and its container; 0 when not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return min(int(found[1]) * 1024 if found else 0, _left_in_container())


def _left_in_container() -> int:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # cgroups v1, or "max": no limit
        return 1 << 62
