"""Where torch's options objects keep their fields in memory, so that `_fast.c` need not ask for them. Runs in the rank.

Asking an AllreduceOptions for its operator through Python makes a new object and wakes much of pybind: a third of what
recording a call costs. The places are found by trying: fields are set to known values and looked for in the bytes,
which are read through /proc/self/mem, where a wrong guess is an error and not a crash. What is not found for certain
is not used, and such calls take the wrapper written in Python.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import ReduceOp

VALUE_AT = 16  # in a pybind object: behind the reference count and the type
BYTES = 64  # of the C++ value that are looked at; our fields are at its front
NOWHERE = -1  # as in _fast.c

#: (type, address of the value, then reduce operator, root, timeout in ms in the value); as Collective takes it.
Layout = tuple[Any, int, int, int, int]


@functools.cache
def layout_of(options: Any) -> Layout | None:
    """The places of the fields of this options class; None when one of them cannot be found."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _layout(options, memory)
    except Exception:  # another torch, another pybind, a kernel that hides our memory from us
        return None
    finally:
        os.close(memory)


def _layout(options: Any, memory: int) -> Layout | None:
    operators = [getattr(ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "BXOR", "PRODUCT")]
    waits = [12_345, 67, 9_876_543]
    places = [
        _find(options, memory, "reduceOp", [(operator, struct.pack("B", hash(operator))) for operator in operators]),
        _find(options, memory, "rootRank", [(root, struct.pack("q", root)) for root in (71, 0, 70_003)]),
        _find(options, memory, "timeout", [(timedelta(milliseconds=ms), struct.pack("q", ms)) for ms in waits]),
    ]  # fmt: skip
    wanted = [hasattr(options(), name) for name in ("reduceOp", "rootRank", "timeout")]
    found = all((place != NOWHERE) == has for place, has in zip(places, wanted, strict=True))
    return (options, VALUE_AT, *places) if found and wanted[2] else None


def _find(options: Any, memory: int, field: str, samples: Iterable[tuple[Any, bytes]]) -> int:
    """The one place where these bytes appear when the field has these values; NOWHERE when there is no such place."""
    if not hasattr(options(), field):
        return NOWHERE
    places: set[int] | None = None
    for value, bits in samples:
        for _ in range(2):
            sample = options()
            setattr(sample, field, value)
            here = set(_places(_value_bytes(sample, memory), bits))
            places = here if places is None else places & here
    return places.pop() if places is not None and len(places) == 1 else NOWHERE


def _value_bytes(sample: Any, memory: int) -> bytes:
    (address,) = struct.unpack("Q", os.pread(memory, 8, id(sample) + VALUE_AT))
    return os.pread(memory, BYTES, address)


def _places(data: bytes, bits: bytes) -> Iterable[int]:
    step = len(bits)
    return (at for at in range(0, len(data) - step + 1, step) if data[at : at + step] == bits)
