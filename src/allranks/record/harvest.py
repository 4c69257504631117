"""torch's own flight recorder, when it is on: taken in the process, or asked for from outside. Runs in the rank.

The first dump with stacks makes torch look for `torch._inductor`, which imports 800 modules; an empty stand-in is
put in its place for the time of the dump unless it is there already.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCES = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's ring (CUDA builds), then the one of gloo and others


def native_dumps(*, stacks: bool = True, only_active: bool = False) -> dict[str, bytes]:
    """The pickles of torch's own rings in this process, by source; empty when there are none."""
    if "torch" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d as c10d

    found: dict[str, bytes] = {}
    with _no_inductor():
        for name in SOURCES:
            dump: Any = getattr(c10d, name, None)
            if dump is None:
                continue
            with contextlib.suppress(Exception):  # a ring that is off or broken must not cost us the rest
                data = bytes(dump(True, stacks, only_active))
                if b"entries" in data:
                    found[name] = data
    return found


def ask_through_pipe(stem: str, rank: int) -> bool:
    """Asks a rank of another process for its NCCL dump (TORCH_NCCL_DEBUG_INFO_PIPE_FILE=stem); False: nobody listens.

    torch writes the dump some time later, to its own file name.
    """
    pipe = Path(f"{stem}{rank}.pipe")
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(fd, b"1")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def _no_inductor() -> Iterator[None]:
    import torch

    if "torch._inductor" in sys.modules or "_inductor" in vars(torch):
        yield
        return
    stand_in = SimpleNamespace()
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is stand_in:  # the real one may have come meanwhile
            del vars(torch)["_inductor"]
