"""Checksums of tensor bytes, and the threads that read and hash: fast enough for every byte of every save and load.

Pure, without torch; used by ranks, by the helper process and by the command. A checksum is always written
with the name of its algorithm, so that a file made with xxhash is refused, not misread, where it is missing.
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

#: Read and hashed at once: what was just read is still in the core's own cache, and the GIL changes hands seldom.
READ_BYTES = 512 << 10
#: Neighbouring shards are read and checked together up to this size: one read for a layer's weight and bias.
TOGETHER_BYTES = 1 << 20


class _Crc32:
    """zlib.crc32 in the shape of a hashlib object."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


#: Every algorithm that checkpoints may name, whether this installation can compute it or not.
ALGORITHMS = ("crc32", "sha256", "xxh3_128")
_MAKERS: dict[str, Callable[[], Hasher]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
if xxhash is not None:
    _MAKERS["xxh3_128"] = xxhash.xxh3_128


def best_algorithm() -> str:
    """The fastest algorithm of this installation: xxh3_128 with the extra [fast], crc32 without."""
    return "xxh3_128" if "xxh3_128" in _MAKERS else "crc32"


def new_hasher(algorithm: str) -> Hasher:
    """A hasher by name; a name this installation cannot compute is an error that names the fix."""
    make = _MAKERS.get(algorithm)
    if make is not None:
        return make()
    if algorithm == "xxh3_128":
        raise MissingExtra("verifying xxh3_128 checksums", "fast")
    raise ValueError(f"unknown checksum algorithm {algorithm!r}")


def checksum(data: bytes | memoryview, algorithm: str) -> str:
    """The checksum of a buffer as hex digits; frees the GIL while it works."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.hexdigest()


T = TypeVar("T")


def cores() -> int:
    """How many threads read and hash at once."""
    return max(2, min(8, len(os.sched_getaffinity(0))))


def in_threads(count: int, items: Iterable[T], act: Callable[[T], object]) -> None:
    """Acts on every item, in their order, in a few threads; raises the first error. At Ctrl-C threads that wait for a store
    are left behind."""
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
