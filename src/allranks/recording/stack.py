"""Interns Python stacks. Runs in the rank, on the hot path.

`_fast.c` walks the frames and looks the stack up by its code objects and instructions. Only a new stack is described here.
Frames of torch.distributed's and allranks' plumbing are skipped, and only the innermost few library frames are kept, so that
eight frames reach the user's line even inside FSDP. A call on a thread of C++, such as autograd's, has no user frame; the
frames of the main thread, which waits in backward(), are appended.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import threading
from types import FrameType

from allranks.blackbox.file_writer import Box
from allranks.blackbox.layout import Item
from allranks.recording.options import fast

MAX_STACKS = 20_000  # distinct stacks; later ones are not recorded

_PLUMBING_STARTS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen")
_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/")
_PLUMBING_ENDS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "/contextlib.py",
)


class Stacks:
    """Maps stacks to ids of the black box."""

    def __init__(self, box: Box, depth: int) -> None:
        self._box = box
        self._count = 0
        known = (_PLUMBING_STARTS, _PLUMBING_ENDS, library_roots(), _LIBRARY_PARTS)
        self.engine = fast().Stacks(depth, threading.main_thread().ident or 0, *known)  # -1: a new stack

    def at(self, frame: FrameType | None) -> int:
        """The id of the stack that starts at `frame`; 0 without a stack or if the table is full."""
        found: int = self.engine.capture(frame)
        if found >= 0 or self._count >= MAX_STACKS or frame is None:
            return max(found, 0)
        self._count += 1
        frames = [
            [getattr(code, "co_qualname", code.co_name), code.co_filename, line]
            for code, line in self.engine.frames(frame)
        ]
        number = self._box.intern(Item.STACK, frames) if frames else 0
        self.engine.remember(frame, number)
        return number


@functools.cache
def library_roots() -> tuple[str, ...]:
    """Folders of library code: Python's own, installed packages, torch."""
    paths = [sysconfig.get_paths().get(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    torch = sys.modules.get("torch")
    spec = importlib.util.find_spec("torch") if torch is None else None
    paths += [os.path.dirname(getattr(torch, "__file__", None) or getattr(spec, "origin", None) or "")]
    known = {path for path in paths if path}
    return tuple(sorted(path + os.sep for path in known | {os.path.realpath(path) for path in known}))
