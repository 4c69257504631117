"""Shared memory that a rank copies into and its helper writes from: allocated once, used for every save.

A memfd has no name to leak and lives exactly as long as a process holds it. On a CUDA machine the memory is
registered with the driver, so that the copy out of the device is a plain DMA.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref

import torch

from allranks.checkpoint.layout import padded

_ids = itertools.count(1)


class Arena:
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

    def tensor(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """A tensor over a part of the block; it keeps the mapping alive, not the arena."""
        count = 1
        for size in sizes:
            count *= size
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(sizes)

    def close(self) -> None:
        """Gives the memory back as soon as no tensor over it is left."""
        self._closer()


def _pin(address: int, length: int) -> bool:
    """Registers the memory for DMA; False without CUDA, or where the driver refuses."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(int(torch.cuda.cudart().cudaHostRegister(address, length, 0)) == 0)


def _close(fd: int, pinned_address: int) -> None:
    if pinned_address:
        torch.cuda.cudart().cudaHostUnregister(pinned_address)
    os.close(fd)
