"""torch's own log, silenced while a group is made: when that is called off, it prints C++ stack traces.

Runs in a rank. The level is one number in libc10, read at every line; torch offers no way to set it once it is
imported. Where the number cannot be found nothing is silenced.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

_FATAL = 3
_lock = threading.Lock()
_silencers = 0
_before = 0


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """torch prints nothing inside: what goes wrong is raised, and told by us. Any number of threads at once."""
    global _silencers, _before
    level = _level()
    if level is None:
        yield
        return
    with _lock:
        if _silencers == 0:
            _before, level.value = level.value, max(level.value, _FATAL)
        _silencers += 1
    try:
        yield
    finally:
        with _lock:
            _silencers -= 1
            if _silencers == 0:
                level.value = _before


@lru_cache(maxsize=1)
def _level() -> ctypes.c_int | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
