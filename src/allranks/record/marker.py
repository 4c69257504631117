"""Markers in a CUDA stream: how the end of a call is noticed for which there is no Work. Runs in the rank."""

from __future__ import annotations

from typing import Any

import torch

from allranks.record.torch_internals import current_stream_key


class EventMarker:
    """A CUDA event behind what is queued on the current stream. Events and streams are reused: both are dear."""

    __slots__ = ("_device", "_event")
    _free: dict[int, list[Any]] = {}  # events by device: one cannot be recorded on another's stream
    _streams: dict[tuple[int, int, int], Any] = {}
    _ready = False  # CUDA is in use in this process; it stays so

    def __init__(self, event: Any, device: int) -> None:
        self._event = event
        self._device = device

    @classmethod
    def make(cls) -> EventMarker | None:
        """A marker on the current stream; None when there is no device, or while a graph is captured."""
        if not cls._ready:
            if not torch.cuda.is_initialized():
                return None
            cls._ready = True
        key = current_stream_key()
        if key is None:
            return None
        stream = cls._streams.get(key)
        if stream is None:
            stream = cls._streams[key] = torch.cuda.current_stream()
        free = cls._free.setdefault(key[1], [])
        event = free.pop() if free else torch.cuda.Event()
        event.record(stream)
        return cls(event, key[1])

    def is_completed(self) -> bool:
        """Whether the device has come past it; asked no more after the first yes."""
        if not self._event.query():
            return False
        free = self._free[self._device]
        if len(free) < 256:
            free.append(self._event)
        return True
