"""Host memory for bytes on the way from or to a device: one per connection, reused from stripe to stripe.

Runs in a rank, on the threads of the healing channel. Copies go over a stream of our own, so that they do not
queue up behind the forward and backward that the training thread has already given to the device; `fetch` and
`store` return only when the copy is done, so nobody else has to know of that stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from allranks.checkpoint.tensors import memory_of


@dataclass(eq=False)
class Staging:
    """Not for several threads at once. What `fetch` or `room` gave is overwritten by the next call."""

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
