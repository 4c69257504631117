"""A rank's live state as bytes on the way: which tensors there are, and where their bytes lie.

Nothing is copied here but what may change under our hands (buffers of the wrapped modules, and all small tensors:
they may be counters) and what has no contiguous CPU bytes; the rest is read from, or received into, the tensors
that train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allranks.channel.keys import ChannelError
from allranks.checkpoint.tensors import flatten, memory_of, unflatten
from allranks.manager.heal.staging import Staging, stream_beside
from allranks.manager.plan import Position

#: Tensors up to this size are copied when they are offered: forward may change them (buffers, counters).
SMALL_BYTES = 64 << 10
STRIPE_BYTES = 4 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # exactly these: asking a tensor for a missing attribute is slow


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


def make_landing(
    layout: StateLayout,
    own_state: object,
    device: torch.device | None = None,
    moving: frozenset[int] = frozenset(),
) -> Landing:
    """Prepares memory for a layout, reusing the tensors of our own state that no forward may be changing."""
    own = flatten(own_state).tensors
    values, locals_ = {}, []
    for note in layout.notes:
        value, local = _place(note, own, device, moving)
        values[note.name] = value
        locals_.append(local)
    return Landing(layout, values, tuple(locals_))


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
    note: TensorNote,
    own: Mapping[str, torch.Tensor],
    device: torch.device | None,
    moving: frozenset[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    mine = own.get(note.name)
    dtype = _dtype(note.dtype)
    if mine is not None:
        local = local_of(mine)
        fits = local.dtype == dtype and tuple(local.shape) == note.shape and local.is_contiguous()
        # A forward may be changing it: then load_state_dict will bring it in.
        moves = local.data_ptr() in moving or (note.nbytes <= SMALL_BYTES and not note.whole)
        if fits and not moves and (local is not mine) == bool(note.whole):
            return mine, local.detach()
        device = local.device
    fresh = torch.empty(note.shape, dtype=dtype, device=device)
    return (_sharded_like(fresh, note, own) if note.whole else fresh), fresh


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
