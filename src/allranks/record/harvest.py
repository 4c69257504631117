"""torch's own flight recorder, when it is on: taken in the process, or asked for from outside. Runs in the rank."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from allranks.record.options import TORCH_ERRORS


def native_dumps(*, stacks: bool = True, only_active: bool = False) -> dict[str, bytes]:
    """The pickles of torch's own rings in this process, by source; empty when there are none."""
    if "torch" not in sys.modules:
        return {}
    from allranks.record.torch_internals import no_inductor, own_rings

    found: dict[str, bytes] = {}
    with no_inductor():
        for name, dump in own_rings().items():
            with contextlib.suppress(*TORCH_ERRORS):  # a ring that is off or broken must not cost us the rest
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
