"""Values of a given type from JSON or plain values, by msgspec.

What msgspec learns about a class is kept in that class, and kept before it is complete: two threads that use a class for
the first time at once crash the process (msgspec 0.22). Here one thread at a time does it.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_first_use = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type; what it raises is a ValueError."""
    found = _decoders.get(kind)
    if found is None:
        with _first_use:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def from_json(data: bytes | str, kind: type[T]) -> T:
    """`msgspec.json.decode(data, type=kind)`, from any thread."""
    return json_decoder(kind).decode(data)


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """`msgspec.convert(value, kind)`, from any thread."""
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
