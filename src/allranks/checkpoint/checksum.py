"""Checksums of tensor bytes, and the threads that read and hash them. No torch.

A checksum is stored with its algorithm. Without xxhash, a file that needs it is refused.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from allranks.channel.frames import Hasher
from allranks.errors import MissingExtra

try:  # nine times the speed of sha256, three times that of crc32
    import xxhash
except ImportError:  # pragma: no cover - exercised where the extra is missing
    xxhash = None  # type: ignore[assignment]

#: Bytes read and then hashed at a time: they are still in the core's cache, and the GIL is rarely handed over.
READ_BYTES = 512 << 10
#: Adjacent shards up to this total size are read with one call, for example a layer's weight and bias.
TOGETHER_BYTES = 1 << 20


class _Crc32:
    """zlib.crc32 with the interface of a hashlib object."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


#: Every algorithm that a checkpoint may name, including those that this installation lacks.
ALGORITHMS = ("crc32", "sha256", "xxh3_128")
_MAKERS: dict[str, Callable[[], Hasher]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
if xxhash is not None:
    _MAKERS["xxh3_128"] = xxhash.xxh3_128


def best_algorithm() -> str:
    """The fastest available algorithm: xxh3_128 with the extra [fast], else crc32."""
    return "xxh3_128" if "xxh3_128" in _MAKERS else "crc32"


def new_hasher(algorithm: str) -> Hasher:
    """A hasher by name; MissingExtra if its library is not installed."""
    make = _MAKERS.get(algorithm)
    if make is not None:
        return make()
    if algorithm == "xxh3_128":
        raise MissingExtra("verifying xxh3_128 checksums", "fast")
    raise ValueError(f"unknown checksum algorithm {algorithm!r}")


def checksum(data: bytes | memoryview, algorithm: str) -> str:
    """The checksum of a buffer as hex digits; releases the GIL."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


T = TypeVar("T")


def cores() -> int:
    """Number of threads that read and hash."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def in_threads(count: int, items: Iterable[T], act: Callable[[T], object]) -> None:
    """Calls `act` on every item, in order, in up to `count` threads; raises the first error.

    Ctrl-C leaves threads behind that wait for a store.
    """
    left = list(items)
    left.reverse()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                item = left.pop()
            except IndexError:
                return
            try:
                act(item)
            except BaseException as error:
                errors.append(error)

    others = [
        threading.Thread(target=work, name="allranks-read", daemon=True)
        for _ in range(min(count, len(left)) - 1)
    ]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        try:
            thread.join(1.0 if any(not isinstance(error, Exception) for error in errors) else None)
        except KeyboardInterrupt as error:
            errors.append(error)
    if errors:
        raise errors[0]
