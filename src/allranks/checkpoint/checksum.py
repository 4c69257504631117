"""Checksums of tensor bytes: fast enough to run over every byte of every save and load.

Pure, without torch; used by ranks, by the helper process and by the command. A checksum is always written
with the name of its algorithm, so that a file made with xxhash is refused, not misread, where it is missing.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol

from allranks.errors import MissingExtra

try:  # nine times the speed of sha256, three times that of crc32
    import xxhash
except ImportError:  # pragma: no cover - exercised where the extra is missing
    xxhash = None  # type: ignore[assignment]

#: Bytes hashed at once: small enough to be in the cache still when just read, large enough to free the GIL.
PIECE_BYTES = 4 << 20


class Hasher(Protocol):
    """What hashlib objects offer; the part used here."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    """zlib.crc32 in the shape of a hashlib object."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


_MAKERS: dict[str, Callable[[], Hasher]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
if xxhash is not None:
    _MAKERS["xxh3_128"] = xxhash.xxh3_128


def best_algorithm() -> str:
    """The fastest algorithm of this installation: xxh3_128 with the extra [fast], crc32 without."""
    return "xxh3_128" if "xxh3_128" in _MAKERS else "crc32"


def new_hasher(algorithm: str) -> Hasher:
    """A hasher by name; a name this installation cannot compute is an error that names the cure."""
    if algorithm == "xxh3_128" and algorithm not in _MAKERS:
        raise MissingExtra("verifying xxh3_128 checksums", "fast")
    if algorithm not in _MAKERS:
        raise ValueError(f"unknown checksum algorithm {algorithm!r}")
    return _MAKERS[algorithm]()


def checksum(data: bytes | memoryview, algorithm: str) -> str:
    """The checksum of a buffer as hex digits; frees the GIL while it works."""
    hasher = new_hasher(algorithm)
    for start in range(0, len(data), PIECE_BYTES):
        hasher.update(data[start : start + PIECE_BYTES])
    return hasher.hexdigest()


def identifies_content(algorithm: str) -> bool:
    """Whether equal checksums may be taken for equal bytes (128 bits and more, no enemy assumed)."""
    return algorithm in {"xxh3_128", "sha256"}
