"""A rank's live state as bytes on the way: which tensors there are, and where their bytes lie.

Nothing is copied here but what may change under our hands (buffers of the wrapped modules, and all small tensors:
they may be counters) and what has no contiguous CPU bytes; the rest is read from, or received into, the tensors
that train.
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

#: Tensors up to this size are copied when they are offered: forward may change them (buffers, counters).
SMALL_BYTES = 64 << 10
STRIPE_BYTES = 4 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: asking a tensor for a missing attribute is slow


@dataclass(eq=False)
class Staging:
    """Host memory for bytes on the way from or to a device: one per connection, reused from stripe to stripe.

    Copies go over a stream of our own, so that they do not queue up behind the forward and backward that the training
    thread has already given to the device; `fetch` and `store` return only when the copy is done, so nobody else has to
    know of that stream. Not for several threads at once. What `fetch` or `room` gave is overwritten by the next call.
    """

    copying_s: float = 0.0  # spent in copies from or to a device
    moved_bytes: int = 0  # that its connection has sent or received
    _memory: torch.Tensor | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def fetch(self, source: torch.Tensor) -> memoryview:
        """The bytes of a flat uint8 tensor of a device."""
        host = self._host(source.numel())
        with self._beside(source.device):
            host.copy_(source, non_blocking=True)
        return memory_of(host)

    def room(self, length: int) -> memoryview:
        """Where bytes for a device may be received, before they are checked and stored."""
        return memory_of(self._host(length))

    def store(self, offset: int, target: torch.Tensor) -> None:
        """Brings received bytes, from `offset` of the room on, into a flat uint8 tensor of a device."""
        if self._memory is not None and target.numel():
            with self._beside(target.device):
                target.copy_(self._memory[offset : offset + target.numel()], non_blocking=True)

    def _host(self, length: int) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < length:
            self._memory = torch.empty(length, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._memory[:length]

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        began = time.monotonic()
        with stream_beside(device, self._streams):
            yield
        self.copying_s += time.monotonic() - began


@contextlib.contextmanager
def stream_beside(device: torch.device, streams: dict[torch.device, torch.cuda.Stream]) -> Iterator[None]:
    """Inside, work for a GPU queues up on a stream of `streams`; when it is left, that work is done. A CPU needs none."""
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
    """How the state of a rank is got at, from any thread, while nothing changes it."""

    read: Callable[[], object]
    moving: Callable[[], frozenset[int]] = frozenset  # addresses of tensors that a forward may change
    volatile: Callable[[], bool] = bool  # whether all of it may change between commits

    def offer(self, position: Position) -> Offer:
        """Makes it fetchable as it stands now."""
        return make_offer(position, self.read(), self.volatile(), self.moving())

    def landing(self, layout: StateLayout, keep: bool = False) -> Landing:
        """Memory for a state that is fetched: our own tensors, but for those that a forward may be changing.

        `keep`: new memory, so that our state stays whole until all of the other is here; our own where there is too little.
        """
        own, moving = flatten(self.read()).tensors, self.moving()
        apart = keep and has_room(_needs(layout, own))
        placed = [_place(note, own, moving, apart) for note in layout.notes]
        values = {note.name: value for note, (value, _) in zip(layout.notes, placed, strict=True)}
        return Landing(layout, values, tuple(local for _, local in placed), apart)


@dataclass(frozen=True)
class TensorNote:
    """One tensor of the layout. `whole` is the global shape of a sharded (DTensor) one, else empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    whole: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateLayout:
    """What a source offers: the skeleton (JSON) and its tensors, in order."""

    skeleton: object
    notes: tuple[TensorNote, ...]

    @property
    def total_bytes(self) -> int:
        return sum(note.nbytes for note in self.notes)

    def to_json(self) -> dict[str, object]:
        """For the wire."""
        return {
            "skeleton": self.skeleton,
            "notes": [[n.name, n.dtype, list(n.shape), n.nbytes, list(n.whole)] for n in self.notes],
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> StateLayout:
        """From the wire; the sizes are checked against shapes before anything is allocated."""
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
    """A state that may be fetched: valid until the rank commits its next step."""

    position: Position
    layout: StateLayout
    tensors: tuple[torch.Tensor, ...]

    def read(self, segments: Sequence[HealSegment], staging: Staging) -> Iterator[memoryview]:
        """The bytes of the segments, one after the other; each valid until the next is asked for."""
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
    """Makes a state fetchable. `copy` takes a whole copy: for states that change before the next commit."""
    flat = flatten(state)
    notes, tensors = [], []
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for name, tensor in flat.tensors.items():
        local = local_of(tensor)
        whole = tuple(tensor.shape) if local is not tensor else ()
        nbytes = local.numel() * local.element_size()
        # Not queued up behind the forward and backward that the training thread has given to the device.
        if nbytes <= SMALL_BYTES:  # to the host: copies on the device would have to be kept from being freed
            with stream_beside(local.device, streams):
                local = local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        elif copy or not local.is_contiguous() or local.data_ptr() in moving:
            with stream_beside(local.device, streams):
                local = local.detach().clone(memory_format=torch.contiguous_format)
        notes.append(
            TensorNote(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), nbytes, whole)
        )
        tensors.append(local.detach())
    return Offer(position, StateLayout(flat.skeleton, tuple(notes)), tuple(tensors))


@dataclass(frozen=True)
class Landing:
    """Where a fetched state goes: into our own tensors where they fit, else into new ones."""

    layout: StateLayout
    values: dict[str, torch.Tensor]  # what load_state_dict will see
    locals: tuple[torch.Tensor, ...]  # contiguous memory in layout order
    apart: bool = False  # none of it is our own

    def views(self, segments: Sequence[HealSegment], staging: Staging) -> list[memoryview]:
        """Writable bytes: the tensors' own on the CPU, room beside a device for its tensors (see `settle`)."""
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
        """Brings checked bytes onto their device. Nothing to do on the CPU: they are there already."""
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
    """Cuts a layout into pieces of about `size` bytes; small tensors share one, large ones span several."""
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
    """The part of a DTensor that lies in this rank; a plain tensor itself."""
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
        # A forward may be changing it: then load_state_dict will bring it in.
        moves = local.data_ptr() in moving or (note.nbytes <= SMALL_BYTES and not note.whole)
        if not apart and fits and not moves and (local is not mine) == bool(note.whole):
            return mine, local.detach()
        device = local.device
    fresh = torch.empty(note.shape, dtype=dtype, device=device)
    return (_sharded_like(fresh, note, own) if note.whole else fresh), fresh


def _needs(layout: StateLayout, own: Mapping[str, torch.Tensor]) -> dict[torch.device, int]:
    """Bytes of a second copy, by device."""
    needs: dict[torch.device, int] = {}
    for note in layout.notes:
        device = local_of(own[note.name]).device if note.name in own else torch.device("cpu")
        needs[device] = needs.get(device, 0) + note.nbytes
    return needs


def _sharded_like(local: torch.Tensor, note: TensorNote, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Wraps a new local shard (optimizer state) as our own DTensor of the same shape is wrapped."""
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
    # .data: receiving must not look like an in-place change to autograd while a backward still runs
    return tensor.data.reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ChannelError(f"unknown dtype {name!r}")
    return found


_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory that a copy may take


def has_room(needs: dict[torch.device, int]) -> bool:
    """Whether so many bytes are free on each device."""
    return all(size <= _SHARE * free_bytes(device) for device, size in needs.items())


def free_bytes(device: torch.device) -> int:
    """Of the device, or of this machine and its container; 0 where that is not known."""
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
    except (OSError, ValueError):  # another version of cgroups, or "max": no limit
        return 1 << 62
