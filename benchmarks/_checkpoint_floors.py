"""What no checkpoint can beat: memcpy of the state, a raw write with fsync, a raw read, all in plain Python."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from _checkpoint_job import MB, Job, median

_PIECE = 32 * MB


def save_floors(job: Job, folder: Path, rounds: int) -> dict[str, float]:
    """memcpy with one and two threads, and a raw write with fsync of as many bytes."""
    sources = [t.contiguous() for t in job.tensors()]
    targets = [torch.empty_like(t) for t in sources]

    def copy(part: int, parts: int) -> None:
        for source, target in list(zip(sources, targets, strict=True))[part::parts]:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    def both() -> None:
        other = threading.Thread(target=copy, args=(1, 2))
        other.start()
        copy(0, 2)
        other.join()

    copy(0, 1)
    buffer = memoryview(bytearray(os.urandom(MB) * (job.bytes // MB + 1)))[: job.bytes]
    path = folder / "raw"
    found = {
        "memcpy_1_s": median(lambda: copy(0, 1), rounds),
        "memcpy_2_s": median(both, rounds),
        "raw_write_fsync_s": median(lambda: raw_write(path, buffer), rounds),
    }
    path.unlink()
    return found


def raw_write(path: Path, buffer: memoryview) -> None:
    """Plain writes and an fsync: nothing is checked."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    while done < len(buffer):
        done += os.write(fd, buffer[done : done + _PIECE])
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, buffer: memoryview) -> None:
    """Plain reads into memory that is there already, as the tensors of a model are."""
    with path.open("rb", buffering=0) as file:
        done, size = 0, os.fstat(file.fileno()).st_size
        while done < size:
            done += file.readinto(buffer[done : done + _PIECE]) or 0


def raw_read_in_place(path: Path, views: Sequence[memoryview]) -> None:
    """The same into the tensors of the model themselves: many pieces of memory in small pages, not one in large ones."""
    with path.open("rb", buffering=0) as file:
        file.seek(os.fstat(file.fileno()).st_size - sum(map(len, views)))
        for view in views:
            done = 0
            while done < len(view):
                done += file.readinto(view[done : done + _PIECE]) or 0


def raw_read_fresh(path: Path) -> None:
    """The same into new memory, whose pages the kernel has to make first."""
    with mmap.mmap(-1, path.stat().st_size) as block, memoryview(block) as view:
        raw_read(path, view)


def drop_cache(folder: Path) -> None:
    """Takes a file, or every file of a folder, out of the page cache."""
    for path in folder.rglob("*") if folder.is_dir() else [folder]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
